"""A custom autograd.Function stays a call in the graph, with its own backward, and takes part in one plan."""

import contextlib
import copy
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.capture import capture
from memrewrite.records.errors import CaptureError
from memrewrite.records.function_call import FunctionCall
from memrewrite.runtime.dropin import programs
from memrewrite.simulate import run_tracked, simulate
from memrewrite.workload.step import Inputs, Step

WIDTH, LAYERS = 32, 3


class Sign(torch.autograd.Function):
    """A straight-through estimator, with an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1), None


class SetUp(torch.autograd.Function):
    """With a context that is set up apart, and an argument that has a default."""

    @staticmethod
    def forward(x: Tensor, low: float = -0.5) -> Tensor:
        return x.clamp(low, 0.5)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].sigmoid(), None


class Several(torch.autograd.Function):
    """Tensors in a list, a size that varies, several results of which one is no tensor and one has no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, others: list[Tensor], rows: int) -> tuple[Tensor, None, Tensor, Tensor]:
        ctx.save_for_backward(a)
        ctx.set_materialize_grads(False)
        mask = a > 0
        ctx.mark_non_differentiable(mask)
        return a * others[0].detach() / rows, None, mask, a.exp()

    @staticmethod
    def backward(ctx: Any, first: Tensor, _: None, __: None, last: Tensor) -> Any:
        (a,) = ctx.saved_tensors
        return 2 * first + last * a.exp(), None, None


class Dirty(torch.autograd.Function):
    """Writes what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 7 * grad


class Attribute(torch.autograd.Function):
    """Keeps what it is given, and more, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.held = x, {"cosine": x.cos()}
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.x * ctx.held["cosine"]


class Drawn(torch.autograd.Function):
    """Draws from PyTorch's generator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Cast(torch.autograd.Function):
    """Runs in a type of its own under autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].cos()


class Numpy(torch.autograd.Function):
    """Leaves PyTorch, as a kernel in another language does: it has no answer for fake tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        sine = torch.from_numpy(np.sin(x.detach().numpy()) * np.float32(scale))
        signs = torch.from_numpy(np.sign(x.detach().numpy()).astype(np.int8))
        ctx.save_for_backward(x, signs)
        ctx.mark_non_differentiable(signs)
        ctx.doubled = x * 2
        return sine, signs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, signs = ctx.saved_tensors
        return grad * torch.from_numpy(np.cos(x.numpy())) + signs * ctx.doubled, None


class NumpyDrawn(torch.autograd.Function):
    """Likewise, and draws from PyTorch's generator, which is not seen on tensors that stand in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return torch.from_numpy(np.cos(x.detach().numpy())) * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class NumpySetUp(torch.autograd.Function):
    """Likewise, with a context that is set up apart, and a backward alone that needs real tensors."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.from_numpy(grad.numpy() * ctx.saved_tensors[0].numpy())


class Branch(torch.autograd.Function):
    """Lets values decide, and writes what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.positive = bool(x.sum() > 0)
        return x.mul_(2 if ctx.positive else 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (2 if ctx.positive else 3)


class Kernel(torch.autograd.Function):
    """As Triton kernels are called: rows are views, halves of one memory are kept, gradients go where they came in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.detach().view(-1, x.shape[-1])
        both, sums = torch.empty(2, *rows.shape), torch.empty(rows.shape[0])
        np.cos(rows.numpy(), out=both[0].numpy())
        np.sin(rows.numpy(), out=both[1].numpy())
        np.sum(rows.numpy(), axis=1, out=sums.numpy())
        ctx.save_for_backward(rows, both[0], both[1], sums)
        out = torch.empty_like(rows)
        np.multiply(both[1].numpy(), sums.numpy()[:, None], out=out.numpy())
        return out.view(*x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, cosine, sine, sums = (each.numpy() for each in ctx.saved_tensors)
        coming = grad.view(-1, grad.shape[-1]).numpy()
        others = (coming * sine).sum(1, keepdims=True)
        np.multiply(coming, cosine * sums[:, None], out=coming)
        np.add(coming, others + 0 * rows, out=coming)
        return grad


class Writes(torch.autograd.Function):
    """Writes an argument, of which PyTorch hears nothing, and gives one column of it less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        np.multiply(x.detach().numpy(), 2, out=memory.numpy())
        return torch.from_numpy(memory.numpy()[:, 1:].copy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.from_numpy(np.pad(2 * grad.numpy(), ((0, 0), (1, 0)))), None


class Product(torch.autograd.Function):
    """Products in pieces, for which autocast casts the parameter once, and then something that takes more memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        assert np.isfinite(x.detach().numpy()).all()
        out = torch.empty(len(x), len(weight))
        for piece, part in zip(x.chunk(4), out.chunk(4), strict=True):
            part.copy_(torch.nn.functional.linear(piece, weight))
        return out.expand(8, *out.shape).contiguous().mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


COUNTER = itertools.count(1)


class Unsteady(torch.autograd.Function):
    """Gives something else each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * next(COUNTER)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].abs()


ON_FAKES = (Sign, SetUp, Several, Dirty, Attribute, Drawn, Cast, Unsteady)
ON_REAL_ONES = (Numpy, NumpyDrawn, NumpySetUp, Branch, Kernel, Writes)
OF_PYTORCH = {each.__name__ for each in (*ON_FAKES, Kernel)}  # whose memory is
apply: dict[str, Callable[..., Any]] = {kind.__name__: kind.apply for kind in (*ON_FAKES, *ON_REAL_ONES)}
KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Sign": lambda x, weight: apply["Sign"](x, 0.5),
    "Sign of the class": lambda x, weight: cast(Any, Sign).apply(x, 0.5),
    "SetUp": lambda x, weight: apply["SetUp"](x),
    "Several": lambda x, weight: sum(apply["Several"](x, [weight, x], x.shape[0])[::3]),
    "Dirty": lambda x, weight: apply["Dirty"](x * 1),
    "Attribute": lambda x, weight: torch.relu(apply["Attribute"](x)),
    "Drawn": lambda x, weight: apply["Drawn"](x),
    "Cast": lambda x, weight: apply["Cast"](x),
    "a parameter": lambda x, weight: x * apply["Sign"](weight, 2.0),
    "Unsteady": lambda x, weight: apply["Unsteady"](x) + x.sin().exp().cos(),
    "Numpy": lambda x, weight: apply["Numpy"](x, 2.0)[0] + apply["Numpy"](x, 1.0)[1],
    "NumpyDrawn": lambda x, weight: apply["NumpyDrawn"](x).exp().sin(),
    "NumpySetUp": lambda x, weight: apply["NumpySetUp"](x),
    "Branch": lambda x, weight: apply["Branch"](x.sin()),
    "Kernel": lambda x, weight: apply["Kernel"](x.unflatten(1, (4, -1))).flatten(1),
    "Writes": lambda x, weight: _written(x, torch.zeros_like(x)),
    "under no_grad": lambda x, weight: x * _without_grad(x) + apply["Sign"](x, 0.5),
}


def _written(x: Tensor, memory: Tensor) -> Tensor:
    return torch.nn.functional.pad(apply["Writes"](x, memory), (1, 0)) * memory.cos()


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = apply["Sign"](x, 3.0)
    return found


class Net(nn.Module):
    """Linear layers with what ``KINDS`` names between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(KINDS[self.kind](torch.sigmoid(layer(x)), self.weight))
        return x


def rows(count: int = 64) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def taken(module: nn.Module, x: Tensor, amp: bool = False) -> list[Tensor]:
    """The output and all gradients of a step."""
    torch.manual_seed(2)
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out = module(x)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in (*module.parameters(), x) if p.grad is not None)]


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Unsteady"])
def test_it_is_called_in_one_plan_for_the_whole_model(kind: str) -> None:
    model = Net(kind)
    result = memrewrite.optimize(model, rows(), budget="min", loop="drop-output")
    report = result.report
    assert report.equivalent
    assert report.segments
    assert not any("custom_functions" in segment.first + segment.last for segment in report.segments)
    assert report.predicted_after.peak < report.predicted_before.peak
    assert list(programs(result)) == [""]
    assert any(note.startswith("What stays a call as the model makes it, with its own back") for note in report.notes)
    for count in (64, 5):
        expected = taken(model, rows(count))
        found = taken(result, rows(count))
        assert len(found) == len(expected) > LAYERS
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["Sign", "Several", "Attribute", *(kind.__name__ for kind in ON_REAL_ONES)])
def test_the_promised_peak_is_the_real_one(kind: str) -> None:
    model = Net(kind)
    result = memrewrite.optimize(model, rows(), budget="min", verify=False)
    report, step = result.report, Step("train", torch.optim.AdamW)
    for predicted, module in ((report.predicted_before.peak, model), (report.predicted_after.peak, result)):
        real = run_tracked(module, Inputs((rows(),), {}), step).peak
        # What NumPy makes is seen once an operator reads it.
        assert predicted == real if kind in OF_PYTORCH else real <= predicted <= 1.06 * real


def test_it_is_called_under_autocast() -> None:
    model = Net("Cast")
    result = memrewrite.optimize(model, rows(), budget="min", amp="bf16")
    assert result.report.segments
    assert all(map(torch.equal, taken(result, rows(), amp=True), taken(model, rows(), amp=True)))


def test_copies_pickles_and_artifacts_call_it(tmp_path: Path) -> None:
    result = memrewrite.optimize(Net("Sign"), rows(), budget="min")
    expected = taken(result, rows())
    for twin in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert all(map(torch.equal, taken(twin, rows()), expected))
    save(result, tmp_path / "saved")
    source = programs(result)[""].source
    assert f"Sign = importlib.import_module({__name__!r}).Sign\n" in source
    assert "Sign.apply(" in source


def test_what_does_not_repeat_runs_once_a_step() -> None:
    result = memrewrite.optimize(Net("Unsteady"), rows(), budget="min", verify=False)
    source = programs(result)[""].source
    inside = "".join(part for part in source.split("\ndef ") if part.startswith("segment_"))
    assert inside
    assert source.count("Unsteady.apply(") == LAYERS
    assert "Unsteady.apply(" not in inside
    before = next(COUNTER)
    taken(result, rows())
    assert next(COUNTER) - before == LAYERS + 1


def test_one_that_does_not_repeat_without_gradients_runs_once_a_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            found = apply["Unsteady"](x)
        return x * found + apply["Sign"](x, 0.5) + x.sin().exp().cos()

    kinds = {**KINDS, "Unsteady without": lambda x, weight: called(x, weight) + apply["Unsteady"](x)}
    monkeypatch.setattr(f"{__name__}.KINDS", kinds)
    result = memrewrite.optimize(Net("Unsteady without"), rows(), budget="min", verify=False)
    assert result.report.segments
    before = next(COUNTER)
    taken(result, rows())
    assert next(COUNTER) - before == 2 * LAYERS + 1


def test_the_numbers_that_it_is_tried_on_leave_the_random_state_as_it_was() -> None:
    model = Net("Drawn")
    before = torch.get_rng_state()
    memrewrite.optimize(model, rows(), verify=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_written_over_what_it_may_keep() -> None:
    result = memrewrite.optimize(Net("Attribute"), rows())
    assert "is a call that may keep its input" in json.dumps(result.report.to_json())
    assert "aten.relu_" not in programs(result)[""].source


class Given(torch.autograd.Function):
    """Is given a module, as those of reversible networks are, and numbers in other things than lists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, shape: torch.Size, rows: slice) -> Tensor:
        ctx.save_for_backward(x)
        return cast(Tensor, module(x).view(shape)[rows])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None, None, None


class Reversible(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, Given).apply(x, self.inner, x.shape, slice(None)))


def test_one_that_is_given_a_module_is_refused_and_its_submodule_stays_a_call() -> None:
    reason = "The custom autograd.Function Given is given a Linear, which no graph can hold; apply it in a submodule"
    with pytest.raises(CaptureError, match=reason):
        capture(Reversible(nn.Linear(WIDTH, WIDTH)), Inputs((rows(),), {}))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reversible(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    report = memrewrite.optimize(model, rows()).report
    assert any(note.startswith(f"1 (Reversible) stays a call that the model makes: {reason}") for note in report.notes)


def test_a_class_that_no_module_names_is_refused() -> None:
    class Local(Sign):
        pass

    KINDS["Local"] = lambda x, weight: cast(Any, Local).apply(x, 1.0)
    words = "custom autograd.Function Local, whose backward a captured graph loses, and .* define the class at the top"
    try:
        with pytest.raises(CaptureError, match=words):
            capture(Net("Local"), Inputs((rows(),), {}))
    finally:
        del KINDS["Local"]


class Unused(nn.Module):
    """Applies a Function for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        cast(Any, Sign).apply(hidden, 1.0)
        found: Tensor = hidden.relu()
        return found


def test_one_whose_result_is_not_used_is_called_all_the_same() -> None:
    captured = capture(Unused(), Inputs((rows(),), {}))
    assert [n.target.kind for n in captured.graph_module.graph.nodes if isinstance(n.target, FunctionCall)] == [Sign]


class Words(nn.Module):
    """Tokens of any length, whose rows go to ``Kernel`` in one piece."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = x + apply["Kernel"](torch.sigmoid(layer(x)).flatten(0, 1)).view_as(x)
        return x


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
def test_one_that_fake_tensors_cannot_run_is_called_for_any_length() -> None:
    model = Words()
    ids = torch.arange(8 * 12).remainder(50).view(8, 12)
    result = memrewrite.optimize(model, ids, budget="min")
    assert result.report.segments
    for shape in ((8, 12), (8, 5), (3, 12), (5, 8), (2, 2)):
        given = ids.flatten()[: shape[0] * shape[1]].view(shape)
        for module in (model, result):
            module.zero_grad(set_to_none=True)
            module(given).square().mean().backward()
        pairs = zip(model.parameters(), result.parameters(), strict=True)
        assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


class Pieces(torch.autograd.Function):
    """Goes through rows some at a time, in a loop of Python's, as losses in pieces do; others may be more or fewer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, None]:
        ctx.save_for_backward(y)
        return torch.cat([x[i : i + 16] * y.sum(0) for i in range(0, len(x), 16)]), None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> Any:
        return grad * ctx.saved_tensors[0].sum(0), None


class Rows(nn.Module):
    """Rows of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(cast(Any, Pieces).apply(layer(x), y)[0])
        return x


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
def test_one_that_goes_through_its_rows_is_called_for_any_number_of_them() -> None:
    torch.manual_seed(0)
    model = Rows()
    result = memrewrite.optimize(model, (rows(), rows()), budget="min")
    assert result.report.segments
    for x, y in ((64, 64), (5, 64), (64, 5), (33, 47)):
        given = rows(x).requires_grad_(), rows(y)
        found = [torch.autograd.grad(each(*given).sum(), (given[0], *each.parameters())) for each in (model, result)]
        assert all(map(torch.equal, *found))


class Outer(torch.autograd.Function):
    """Its result is of one argument's rows alone, which no fake tensor shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return torch.from_numpy(x.detach().numpy() * y.detach().numpy().sum(0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].sum(0), None


class Two(nn.Module):
    """Takes two inputs of as many rows each as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = torch.tanh(cast(Any, Outer).apply(self.linear(x), y))
        return x


def test_sizes_that_cannot_be_told_apart_are_taken_for_one_and_others_run_the_original() -> None:
    model = Two()
    result = memrewrite.optimize(model, (rows(), rows()), budget="min")
    assert result.report.segments
    for x, y in ((64, 64), (5, 5)):
        assert torch.equal(result(rows(x), rows(y)), model(rows(x), rows(y)))
    for x, y in ((5, 64), (64, 5)):
        with pytest.warns(memrewrite.runtime.promise.FallbackWarning) if x == 5 else contextlib.nullcontext():
            assert torch.equal(result(rows(x), rows(y)), model(rows(x), rows(y)))


class Foreign(nn.Module):
    """Calls another language's code on the memory of its tensors, as a kernel is that is launched in forward."""

    def __init__(self, address: bool) -> None:
        super().__init__()
        self.linear, self.address = nn.Linear(WIDTH, WIDTH), address

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        out = hidden * 2
        if self.address:
            assert hidden.data_ptr() != out.data_ptr()
        else:
            np.negative(hidden.detach().numpy(), out=out.detach().numpy())
        return out + hidden


@pytest.mark.parametrize("address", [False, True])
def test_one_outside_a_function_is_refused_before_it_is_called_for_memory_that_is_not_there(address: bool) -> None:
    with pytest.raises(CaptureError, match=r"memory of a tensor .*\(at test_opaque\.py:\d+.* autograd\.Function"):
        memrewrite.optimize(Foreign(address), rows())


@pytest.mark.parametrize("address", [False, True])
def test_what_calls_one_is_a_call_where_it_is_a_part(address: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        halves = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*halves[:3], Foreign(address), *halves[3:])

    result: Any = memrewrite.optimize(build(), rows(), budget="min")
    assert "3 (Foreign) stays a call that the model makes" in " ".join(result.report.notes)
    assert result.report.segments
    assert list(programs(result)) == [""]
    assert all(map(torch.equal, taken(result, rows()), taken(build(), rows())))


class Products(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = cast(Any, Product).apply(self.first(x).float(), self.weight)
        return found.sum()


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_what_autocast_keeps_of_parameters_counts_while_it_runs(amp: torch.dtype | None) -> None:
    inputs, step = Inputs((rows(16),), {}), Step("train", torch.optim.SGD, amp=amp)
    assert simulate(Products(4000), inputs, step).peak == run_tracked(Products(4000), inputs, step).peak
