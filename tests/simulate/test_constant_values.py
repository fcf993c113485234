"""Values that no input decides are known on fake tensors and in captures; all others are not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import memrewrite
from memrewrite.capture import capture
from memrewrite.records.errors import CaptureError
from memrewrite.simulate import run_tracked, simulate
from memrewrite.simulate.fake.constant_values import LIMIT, known_values
from memrewrite.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from memrewrite.workload.step import Inputs, Step, autocast
from memrewrite.workload.stepspec import optimizer_factory
from tests.capture.test_capture import drop_in
from tests.support.layers import WIDTH, model, x

AMP = {"float32": None, "bf16": "bf16"}


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(tensor)
    return tensor


def beside(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """A view of ``tensor`` from before it was changed."""
    view = tensor.view(-1)[1:]
    change(tensor)
    return view


def packed(positions: Tensor) -> Tensor:
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda given: torch.arange(5),
    "arithmetic": lambda given: (torch.arange(5) + 3) % 4,
    "compared": lambda given: torch.arange(5)[:, None] >= torch.arange(5),
    "lower triangle": lambda given: torch.ones(4, 4, dtype=torch.bool).tril(),
    "like an input": lambda given: torch.ones_like(given).cumsum(-1),
    "full": lambda given: given.new_full((3,), 7).cumsum(0),
    "from a list": lambda given: torch.tensor([[1, 2], [3, 4]]).sum(-1),
    "packed": lambda given: packed(torch.arange(6).unsqueeze(0).expand(3, -1)),
    "written": lambda given: changed(torch.arange(5), lambda t: t.add_(2)),
    "written beside": lambda given: beside(torch.arange(5), lambda t: t.mul_(2)),
    "filled": lambda given: beside(torch.arange(5), lambda t: t[2:].fill_(9)),
    "joined": lambda given: torch.cat([torch.arange(2), torch.tensor([5])]),
    "into another": lambda given: torch.add(torch.arange(3), 1, out=torch.zeros(3, dtype=torch.int64)),
    "of two results": lambda given: torch.sort(torch.arange(4).flip(0))[1],
    "as many as there are": lambda given: torch.nonzero(torch.arange(5) % 2 == 0),
    "as many as are alike": lambda given: torch.unique_consecutive(torch.tensor([4, 4, 2]), return_counts=True)[1],
    "taken by a mask": lambda given: torch.arange(5)[torch.arange(5) > 2],
    "ones with fractions": lambda given: torch.ones(4) == 1,
    "compared with fractions": lambda given: torch.full((2, 3), 0.5) > 0,
    "told of fractions": lambda given: torch.ones_like(given.float()).to(torch.bool).all(-1),
    "drawn and below 0": lambda given: torch.rand(3) < 0.0,
    "drawn and 0 or above": lambda given: torch.rand_like(given.float()) >= 0,
    "drawn and below less": lambda given: torch.rand(3) <= -0.5,
}
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda given: given,
    "made of an input": lambda given: torch.arange(4) + given,
    "taken by an input": lambda given: torch.arange(9)[given],
    "random": lambda given: torch.randint(0, 9, (4,)),
    "drawn": lambda given: changed(torch.arange(4), lambda t: t.random_()),
    "empty": lambda given: torch.empty(4, dtype=torch.int64),
    "empty like": lambda given: torch.empty_like(torch.arange(4)),
    "with fractions": lambda given: torch.arange(4.0),
    "repeated by an input": lambda given: torch.repeat_interleave(given, output_size=6),
    "fractions that are written": lambda given: changed(torch.ones(4), lambda t: t.add_(1)),
    "fractions that are written beside": lambda given: beside(torch.ones(2, 2), lambda t: t.tril_()) > 0,
    "large fill": lambda given: torch.ones(LIMIT + 1),
    "large": lambda given: torch.arange(LIMIT + 1),
    "written from an input": lambda given: changed(torch.arange(4), lambda t: t.copy_(given)),
    "written beside from an input": lambda given: beside(torch.arange(4), lambda t: t.copy_(given)),
    "added an input": lambda given: beside(torch.arange(4), lambda t: t.add_(given)),
    "written where an input says": lambda given: changed(torch.arange(4), lambda t: t.index_fill_(0, given, 1)),
    "written in a list": lambda given: changed(torch.arange(4), lambda t: torch._foreach_add_([t], [given])),
    "into another from an input": lambda given: beside(torch.arange(4), lambda t: torch.add(given, 1, out=t)),
    "drawn and below a share": lambda given: torch.rand(3) < 0.05,
    "drawn and above 0": lambda given: torch.rand(3) > 0,
    "drawn and written": lambda given: changed(torch.rand(3), lambda t: t.sub_(1)) < 0,
    "drawn otherwise": lambda given: torch.randn(3) < 0,
    "other data": lambda given: changed(torch.arange(4), lambda t: setattr(t, "data", given)),
    "other memory": lambda given: changed(torch.arange(4), lambda t: t.set_(given.untyped_storage(), 0, (4,), (1,))),
}


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_known(make: Callable[[Tensor], Tensor]) -> None:
    given = torch.tensor([2, 1, 0, 3])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, known_values() as known:
        fake = make(mode.from_tensor(given))
        assert isinstance(fake, FakeTensor)
        assert not isinstance(fake, torch._subclasses.FakeTensor)
        value = known.value(fake)
        assert (fake == fake.clone()).all()
    assert value is not None
    assert torch.equal(value, make(given))


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown(make: Callable[[Tensor], Tensor]) -> None:
    given = torch.tensor([2, 1, 0, 3])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, known_values() as known:
        fake = make(mode.from_tensor(given))
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert known.asked
        assert known.value(fake) is None


def attends(self: Any, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Any:
    """As transformers does: a mask is left out where nothing is masked but the future, unless tensors are fake."""
    if positions is None:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
    indices = packed(positions.expand(x.shape[0], -1))
    bare = not isinstance(indices, torch._subclasses.FakeTensor) and bool((indices[:, -1] == 0).all())
    if mask is not None:
        bare = bare and not isinstance(mask, torch._subclasses.FakeTensor) and bool(mask.all())
    q, k, v = (layer(x).unsqueeze(1) for layer in (self.linear, self.other, self.linear))
    if bare:
        return scaled_dot_product_attention(q, k, v, is_causal=True)
    steps = torch.arange(x.shape[1])
    allowed = (steps[:, None] >= steps) & (indices[:, None, :, None] == indices[:, None, None, :])
    allowed = allowed if mask is None else allowed & mask[:, None, None, :]
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def decodes(self: Any, x: Tensor) -> Any:
    """As the decoders of Bart and its like do: a mask of ones with fractions, which says that nothing is masked."""
    return attends(self, x, torch.ones(x.shape[:2]).to(torch.bool))


def sequences() -> Tensor:
    return x(3, 8, WIDTH)


def attention_calls(module: nn.Module, inputs: Inputs) -> list[tuple[bool, bool]]:
    """Whether each call of attention in a captured graph is given a mask, and whether it is causal."""
    graph = capture(module, inputs).graph_module.graph
    calls = [n for n in graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    given = [
        (*call.args, None, 0.0, False)[:6] if len(call.args) == 3 else (*call.args, 0.0, False)[:6] for call in calls
    ]
    return [(a[3] is not None, bool(a[5])) for a in given]


CALLS: dict[str, tuple[dict[str, Tensor], tuple[bool, bool]]] = {
    "nothing given": ({}, (False, True)),
    "a mask given": ({"mask": torch.ones(3, 8, dtype=torch.bool)}, (True, False)),
    "positions given": ({"positions": torch.arange(8).expand(3, -1).contiguous()}, (True, False)),
}


@pytest.mark.parametrize(("given", "call"), CALLS.values(), ids=CALLS)
def test_a_capture_takes_the_way_that_the_model_takes_unless_inputs_decide(
    given: dict[str, Tensor], call: tuple[bool, bool]
) -> None:
    module, inputs = model(attends), Inputs((sequences(),), given)
    captured = capture(module, inputs)
    assert attention_calls(module, inputs) == [call]
    assert captured.inputs.leaves[0].shape[0] != 3  # the batch may still vary
    assert captured.exact == (not given)
    assert [note for note in captured.notes if "values of its inputs decide" in note] == list(captured.notes)
    assert len(captured.notes) == len(given)
    targets = [str(node.target) for node in captured.graph_module.graph.nodes]
    assert not [t for t in targets if "item" in t or "_local_scalar_dense" in t]
    assert given or not [t for t in targets if "cumsum" in t or "arange" in t]


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_a_capture_is_bit_equal_for_any_batch(batch: int, amp: torch.dtype | None) -> None:
    module = model(attends)
    optimized = drop_in(module, capture(module, Inputs((sequences(),), {})))
    with autocast(amp, "cpu"):
        assert torch.equal(optimized(x(batch, 8, WIDTH)), module(x(batch, 8, WIDTH)))


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("given", [given for given, _ in CALLS.values()], ids=CALLS)
def test_simulated_equals_real(given: dict[str, Tensor], amp: torch.dtype | None) -> None:
    module, inputs = model(attends), Inputs((sequences(),), given)
    step = Step("train", optimizer_factory("adamw"), lambda output: output.float().sum(), amp)
    assert simulate(module, inputs, step) == run_tracked(copy.deepcopy(module), inputs, step)


def test_a_mask_of_ones_is_left_out_where_a_step_is_simulated() -> None:
    module, inputs, step = model(decodes), Inputs((sequences(),), {}), Step("train", optimizer_factory("adamw"))
    assert simulate(module, inputs, step) == run_tracked(copy.deepcopy(module), inputs, step)


@pytest.mark.parametrize("amp", AMP.values(), ids=AMP)
@pytest.mark.parametrize("given", [given for given, _ in CALLS.values()], ids=CALLS)
def test_optimized_is_equivalent(given: dict[str, Tensor], amp: str | None) -> None:
    def forward(self: Any, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Any:
        for _ in range(4):
            x = self.other(self.linear(x).sigmoid()).sigmoid()
        return attends(self, x, mask, positions)

    module, kwargs = model(forward), {name: tensor[:1].repeat(16, 1) for name, tensor in given.items()}
    optimized: Any = memrewrite.optimize(
        module, (x(16, 8, WIDTH),), example_kwargs=kwargs, budget="min", optimizer="sgd", amp=amp
    )
    assert optimized.report.verdict.startswith(("bit-equal", "equivalent") if given else "bit-equal")


def test_what_inputs_decide_is_refused_as_before() -> None:
    def forward(self: Any, x: Tensor, flags: Tensor) -> Any:
        return self.linear(x) if flags.any() else x

    with pytest.raises(CaptureError, match="lets the values of a tensor decide"):
        capture(model(forward), Inputs((x(), torch.ones(4, dtype=torch.bool)), {}))


def dropping(self: Any, x: Tensor) -> Any:
    """As transformers drops layers, though it drops none unless asked to."""
    for _ in range(4):
        if self.training and torch.rand([]) < self.share:
            continue
        x = self.other(self.linear(x).sigmoid()).sigmoid()
    return x


@pytest.mark.filterwarnings("ignore::memrewrite.FallbackWarning")
def test_layers_that_are_never_dropped_are_part_of_one_graph_which_draws_all_the_same() -> None:
    module = model(dropping, lambda module: setattr(module, "share", 0.0))
    optimized: Any = memrewrite.optimize(module, (x(16, WIDTH),), budget="min", optimizer="sgd")
    assert optimized.report.config["regions"] == [""]
    assert optimized.report.predicted_after.peak < optimized.report.predicted_before.peak
    assert optimized.report.verdict.startswith("bit-equal")
    optimized.share = 1.0  # the program is for another one
    assert torch.equal(optimized(x(16, WIDTH)), x(16, WIDTH))


def test_layers_that_may_be_dropped_stay_a_question() -> None:
    module = model(dropping, lambda module: setattr(module, "share", 0.05))
    with pytest.raises(CaptureError, match="lets the values of a tensor decide"):
        capture(module, Inputs((x(),), {}))


def test_what_a_buffer_decides_is_refused_as_before() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.linear(x) if self.flags.any() else x

    def prepare(module: nn.Module) -> None:
        module.register_buffer("flags", torch.ones(3, dtype=torch.bool))

    with pytest.raises(CaptureError, match="lets the values of a tensor decide"):
        capture(model(forward, prepare), Inputs((x(),), {}))


def test_rows_of_a_batch_that_varies_are_counted_by_no_value() -> None:
    """``sum`` over the batch is no value of one row: the answer stays open, and the sizes are fixed."""

    def forward(self: Any, x: Tensor) -> Any:
        rows = torch.ones(x.shape[0], dtype=torch.int64)
        return self.linear(x) if rows.sum() > 3 else self.other(x)

    module = model(forward)
    captured = capture(module, Inputs((x(),), {}))
    assert captured.inputs.leaves[0].shape == (4, WIDTH)
    assert torch.equal(drop_in(module, captured)(x()), module(x()))


def test_a_fake_tensor_is_called_one_again_afterwards() -> None:
    with pytest.raises(ValueError, match="inside"), FakeTensorMode(), known_values():
        raise ValueError("inside")
    assert vars(torch._subclasses)["FakeTensor"] is FakeTensor
    assert "__getattr__" not in vars(torch._subclasses)
    with FakeTensorMode():
        assert isinstance(torch.arange(3), torch._subclasses.FakeTensor)


def test_pytorch_itself_gets_the_class_and_other_names_are_missing_as_ever() -> None:
    ask = "def ask():\n    from torch._subclasses import FakeTensor\n    return FakeTensor\n"
    scope: dict[str, Any] = {"__name__": "torch.somewhere"}
    exec(ask, scope)  # noqa: S102
    with FakeTensorMode(), known_values():
        assert scope["ask"]() is FakeTensor
        with pytest.raises(AttributeError, match="nothing_such"):
            _ = torch._subclasses.nothing_such  # type: ignore[attr-defined]
