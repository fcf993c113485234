"""Submodules are captured on inputs like those that they are called with: what code asks of these is there to ask."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import memrewrite
from memrewrite.records.errors import CaptureError, MeasurementError, NotEquivalentError
from memrewrite.records.mesh import Mesh
from memrewrite.search.calls import record
from memrewrite.search.regions import find
from memrewrite.simulate import run_tracked
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.workload.step import Inputs, Step
from tests.support.layers import WIDTH
from tests.support.layers import model as of_layers


def mlps() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)])


class Body(nn.Module):
    """Attention as in transformers: a mask that masks nothing is left out, unless tensors are fake."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlps()
        self.key = nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers(x)
        query, key = x.view(*x.shape[:2], 4, 4).transpose(1, 2), self.key(x).unsqueeze(1)
        bare = not isinstance(mask, torch._subclasses.FakeTensor) and bool(mask.all())
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        how = {"is_causal": True} if bare else {"attn_mask": future & mask[:, None, None, :]}
        key = key if bare else key.expand(query.shape)
        found = scaled_dot_product_attention(query, key, key, enable_gqa=bare, **how)
        return x + found.transpose(1, 2).reshape(x.shape)


class Outer(nn.Module):
    """A branch on the values of what a body without one is given, which no graph can hold."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(16, 16), body

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.stem(x)
        if float(x.detach().abs().max()) > 1e6:
            x = x / 2
        result: Tensor = self.body(x, mask)
        return result


@pytest.mark.parametrize("masked", [False, True], ids=["masks nothing", "masks"])
def test_a_part_is_known_to_go_another_way_than_the_values_it_is_given_ask_for(masked: bool) -> None:
    torch.manual_seed(0)
    model, mask = Outer(Body()).train(), torch.ones(4, 12, dtype=torch.bool)
    mask[0, 8:] = not masked
    given = torch.randn(4, 12, 16), mask
    (region,) = find(model, Inputs(given, {}), Step()).found
    assert (region.path, region.captured.exact) == ("body", False)
    assert torch.equal(region.inputs().args[1], mask)
    optimized = memrewrite.optimize(model, given, budget="min", passes=["checkpoint_segments"], cache=False)
    report = memrewrite.report_of(optimized)
    assert report.equivalent, report.verdict
    assert report.changed


class Pooled(nn.Module):
    """A weighted mean, with other last bits where the mask masks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlps()
        self.score = nn.Linear(16, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers(x)
        scores = self.score(x)
        if not isinstance(mask, torch._subclasses.FakeTensor) and bool(mask.all()):
            return (scores.softmax(1) * x).sum(1)
        weights = scores.exp() * mask.unsqueeze(-1)
        return (weights / weights.sum(1, keepdim=True) * x).sum(1)


def test_a_mask_whose_beginning_masks_nothing_is_proved_at_smaller_sizes_too() -> None:
    """There the model goes the other way, which the values of the example did not ask for."""
    torch.manual_seed(0)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[3, 8:] = False
    given = torch.randn(4, 12, 16), mask
    only: dict[str, Any] = {"passes": ["checkpoint_segments"], "cache": False}
    report = memrewrite.report_of(memrewrite.optimize(Pooled().train(), given, budget="min", **only))
    assert report.changed
    assert report.verdict.endswith("also at smaller sizes")
    assert not any("masks nothing" in note for note in report.notes)
    with pytest.raises(NotEquivalentError, match=r"values it asks for decide, .*; leave out exact"):
        memrewrite.optimize(Pooled().train(), given, budget="min", exact=True, **only)


class Reversible(torch.autograd.Function):
    """``y + layer(x)`` of two halves, which keeps its result alone: its backward makes ``y`` again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, layer: nn.Module) -> Tensor:
        result = y + layer(x)
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x = ctx.saved_tensors[0].requires_grad_()
        with torch.enable_grad():
            ctx.layer(x=x, scale=1.0).backward(gradient)
        assert x.grad is not None
        return x.grad, gradient, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlps()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        result: Tensor = self.layers(x) * scale
        return result


class Halves(nn.Module):
    """A block, then another one as a reversible layer, after a branch that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if float(x.detach().abs().max()) > 1e6:
            x = x / 2
        result: Tensor = Reversible.apply(x, x, self.layer)  # type: ignore[no-untyped-call]
        return result


def test_what_runs_in_a_custom_function_is_left_alone_as_its_backward_may_run_it_otherwise() -> None:
    torch.manual_seed(0)
    model, x = Halves().train(), torch.randn(4, 40, 16)
    optimized = memrewrite.optimize(model, x, budget="min", cache=False)
    report = memrewrite.report_of(optimized)
    assert "layer is left alone: the model runs it in its own autograd.Function Reversible." in report.notes
    assert report.equivalent, report.verdict
    assert report.changed


class Freed(Block):
    """Asks for the gradient of its input, as convolutions over sound do for checkpoints: a leaf alone lets it."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x[:, :, :16]
        x.requires_grad = True
        return super().forward(x, scale)


class InTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Freed(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if float(x.detach().abs().max()) > 1e6:
            x = x / 2
        result: Tensor = self.second(x)
        return result


def test_an_input_of_the_model_that_needs_no_gradient_needs_none_in_a_part() -> None:
    torch.manual_seed(0)
    model, x = InTwo().train(), torch.randn(4, 40, 16)
    regions = find(model, Inputs((x,), {}), Step()).found
    needing = {region.path: region.inputs().args[0].requires_grad for region in regions}
    assert needing == {"first": False, "second": True}
    optimized = memrewrite.optimize(model, x, budget="min", cache=False)
    report = memrewrite.report_of(optimized)
    assert report.equivalent, report.verdict


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        return x if mask is None else (x.exp() * mask[:, :, None]).log1p()


class Decides(nn.Module):
    """Leaves out a mask that masks nothing, unless tensors are fake, in code that no graph can hold as it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.calls = nn.Linear(16, 16), Masked(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        mask = torch.ones(x.shape[:2]) * 2 > 1
        bare = not isinstance(mask, torch._subclasses.FakeTensor) and bool(mask.all())
        result: Tensor = self.body(self.stem(x), None if bare else mask)
        return result


def test_a_part_that_fake_values_lead_elsewhere_is_counted_on_real_ones() -> None:
    torch.manual_seed(0)
    model, x = Decides().train(), torch.randn(4, 40, 16)
    optimized = memrewrite.optimize(model, x, budget="min", optimizer="none", cache=False)
    report = memrewrite.report_of(optimized)
    assert report.equivalent, report.verdict
    assert [*report.config["regions"]] == ["body"]
    assert report.predicted_after.peak == run_tracked(optimized, Inputs((x,), {}), Step()).peak
    assert report.predicted_after.peak < report.predicted_before.peak


class Attends(nn.Module):
    """Attention to itself, whose weights it keeps in a list, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.body = nn.MultiheadAttention(16, 4, batch_first=True), Block()
        self.maps: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, average_attn_weights=False)
        self.maps[:] = [weights]
        result: Tensor = self.body(y)
        return result


def test_a_part_that_asks_whether_what_it_is_given_is_one_tensor_is_given_one() -> None:
    torch.manual_seed(0)
    model, x = Attends().train(), torch.randn(4, 40, 16)
    attention, _ = find(model, Inputs((x,), {}), Step()).found
    given = attention.inputs().args
    assert given[0] is given[1] is given[2]
    optimized = memrewrite.optimize(model, x, budget="min", cache=False)
    report = memrewrite.report_of(optimized)
    assert [*report.config["regions"]] == ["attention", "body"]
    assert report.equivalent, report.verdict
    assert report.changed


class Attended(nn.Module):
    """Attention to itself by a layer of PyTorch's, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.body = nn.MultiheadAttention(16, 4, batch_first=True), Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(self.attention(x, x, x, need_weights=False)[0])
        return result


class Frozen(nn.Module):
    """A block that trains on what a frozen model gives."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.body = Attended().requires_grad_(False), Block()

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        result: Tensor = self.body(x)
        return result


def test_attention_that_one_kernel_runs_without_gradients_stays_a_call() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 40, 16)
    report = memrewrite.report_of(memrewrite.optimize(Attended().eval(), x, budget="min", cache=False))
    assert report.verdict.startswith("bit-equal")
    (note,) = report.notes
    assert note.startswith(
        "attention (MultiheadAttention) stays a call that the model makes: PyTorch may run it by one"
    )
    trained = memrewrite.report_of(memrewrite.optimize(Attended().train(), x, budget="min", cache=False))
    assert trained.verdict.startswith("bit-equal")
    assert not trained.notes


def test_a_frozen_part_with_such_attention_is_left_alone_and_the_rest_is_not() -> None:
    torch.manual_seed(0)
    model, x = Frozen().train(), torch.randn(4, 40, 16)
    report = memrewrite.report_of(memrewrite.optimize(model, x, budget="min", cache=False))
    assert report.verdict.startswith("bit-equal")
    assert [*report.config["regions"]] == ["frozen.body", "body"]
    assert "frozen is left alone: PyTorch may run attention in it by one kernel in eval mode." in report.notes
    assert report.changed


class Differentiates(nn.Module):
    """A block, and what another one's Jacobian is, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.jacrev(lambda row: self.inner(row).sum(0))(x[0, :2])
        result: Tensor = self.body(x) + slopes.sum()
        return result


def test_a_part_that_torch_func_transforms_is_left_alone_and_its_neighbour_is_not() -> None:
    torch.manual_seed(0)
    model, x = Differentiates().train(), torch.randn(4, 40, 16)
    report = memrewrite.report_of(memrewrite.optimize(model, x, budget="min", cache=False))
    assert report.verdict.startswith("bit-equal")
    assert [*report.config["regions"]] == ["body"]
    assert report.changed
    reason = "inner is left alone: it is called within a transform of torch.func, as grad and vmap are."
    assert reason in report.notes


class Repeated(nn.Module):
    """A block under a checkpoint of the model's own, of the kind that asks for an input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = Block(), nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(40))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.body, self.stem(x), use_reentrant=True)
        return result


def test_nothing_is_warned_of_that_is_so_without_gradients_alone() -> None:
    report = memrewrite.report_of(
        memrewrite.optimize(Repeated().train(), torch.randn(4, 40, 16), budget="min", cache=False)
    )
    assert "updates buffers under its own torch.utils.checkpoint" in report.notes[0]


class Curved(nn.Module):
    """A block, and what the second derivatives of a network are by its output, as in physics-informed nets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block()
        self.field = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        second = torch.func.vmap(torch.func.hessian(lambda row: self.field(row).sum()))(self.body(x)[:, 0])
        result: Tensor = second.square().mean()
        return result


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own, on its first jvp
def test_a_part_beside_derivatives_that_fake_tensors_do_not_carry_is_rewritten() -> None:
    torch.manual_seed(0)
    model, x = Curved().train(), torch.randn(4, 40, 16)
    assert memrewrite.estimate(model, x).peak.bytes == memrewrite.measure(model, x).peak
    report = memrewrite.report_of(memrewrite.optimize(model, x, budget="min", cache=False))
    assert report.equivalent, report.verdict
    assert [*report.config["regions"]] == ["body"]
    assert report.changed


class Indexes(nn.Module):
    """Numbers of a tensor, one by one, as an index, which fake tensors do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(16, 16), Block()

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = self.stem(x)
        result: Tensor = self.body(x[tuple(rows),])
        return result


def branching(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, self.linear, self.other, (x,))


def scanning(self: Any, x: Tensor) -> Any:
    carried, each = scan(lambda so_far, row: (so_far + row, so_far * row), x[0], self.linear(x), dim=0)
    return carried + each


@pytest.mark.parametrize(("forward", "operator"), [(branching, "cond"), (scanning, "scan")], ids=["cond", "scan"])
def test_a_higher_order_operator_is_named_where_nothing_tells_what_it_takes(forward: Any, operator: str) -> None:
    module, rows = of_layers(forward), torch.randn(4, WIDTH)
    reason = rf"Model calls the higher-order operator {operator} \(at test_calls.py:\d+\), and what that runs"
    with pytest.raises(CaptureError, match=reason):
        memrewrite.optimize(module, rows, budget="min", cache=False)
    with pytest.raises(CaptureError, match=reason):
        memrewrite.estimate(module, rows)
    with pytest.raises(MeasurementError, match=reason):
        memrewrite.measure(module, rows)


def test_a_model_that_indexes_with_the_numbers_of_a_tensor_is_rewritten_in_parts() -> None:
    torch.manual_seed(0)
    model, given = Indexes().train(), (torch.randn(6, 40, 16), torch.tensor([0, 5, 2, 3]))
    report = memrewrite.report_of(memrewrite.optimize(model, given, budget="min", cache=False))
    assert report.equivalent, report.verdict
    assert [*report.config["regions"]] == ["body"]
    assert report.changed
    reason = r"Indexes makes an index of the numbers in a tensor, taken one by one \(at test_calls.py:\d+\)"
    assert re.search(reason, report.notes[0])
    assert report.notes[-1].startswith("The peak is that of real steps on the example, as tensors without data cannot")


KINDS: list[type] = []


class Seen(nn.Module):
    """Notes what its tensors are, and hands a mask on to a body, expanded, as transformers does."""

    def __init__(self, body: nn.Module, bound: float = math.inf) -> None:
        super().__init__()
        self.body, self.bound = body, bound

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        KINDS.append(type(x))
        if self.bound < math.inf and float(x.detach().abs().max()) > self.bound:
            return x
        return self.body(x, mask[:, None].expand(2, 3, 8)[:, 0], torch.arange(8).expand(2, 8))


class WithPlaces(Body):
    def forward(self, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + places.sum(), mask)


@pytest.fixture
def rows() -> Inputs:
    return Inputs((torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.bool)), {})


def in_mesh() -> Step:
    return Step(mesh=Mesh.parse("fsdp=2"))


def test_calls_in_a_mesh_are_seen_on_fake_tensors(rows: Inputs) -> None:
    model = Seen(WithPlaces())
    del KINDS[:]
    really = record(model, rows, Step())
    assert {*KINDS} == {Tensor}
    del KINDS[:]
    found = record(model, rows, in_mesh())
    assert {*KINDS} == {FakeTensor}
    for module, calls in really.items():
        (one,), (other,) = calls, found[module]
        assert one.number == other.number
        assert (one.args, one.kwargs, one.unfit) == (other.args, other.kwargs, other.unfit)
        pairs = zip(tensors_in(one.inputs(False)), tensors_in(other.inputs(False)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_calls_in_a_mesh_are_seen_for_real_where_values_decide(rows: Inputs) -> None:
    model = Seen(WithPlaces(), 1e6)
    del KINDS[:]
    found = record(model, rows, in_mesh())
    assert KINDS[-1] is Tensor
    assert [call.number for call in found[model.body]] == [1]


class Placed(nn.Module):
    """Language model that takes images for some of its tokens, and counts these, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(20, 16), mlps()

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        places, x = (words == 19).unsqueeze(-1), self.words(words)
        if int(places.sum()) * 16 != images.numel():
            raise ValueError("Images and their tokens do not match.")
        result: Tensor = self.body(x.masked_scatter(places, images))
        return result


def test_sizes_vary_where_texts_must_not_be_cut() -> None:
    torch.manual_seed(0)
    model = Placed().train()

    def given(texts: int, length: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, 19, (texts, length))
        words[:, 1:9] = 19
        return words, torch.randn(texts, 8, 16)

    optimized = memrewrite.optimize(model, given(4, 12), budget="min", optimizer="none", cache=False, exact=True)
    assert memrewrite.report_of(optimized).changed
    for texts, length in ((4, 12), (2, 12), (4, 10), (3, 11)):  # with warnings as errors
        example = given(texts, length)
        assert torch.equal(optimized(*example), model(*example))
