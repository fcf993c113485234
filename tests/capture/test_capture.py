"""A captured graph, written as source and run as a drop-in, computes what the model does, bit for bit.

Whatever happens, the model is as it was: values, hooks, modes, gradients and random state.
"""

import enum
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from memrewrite.capture import Captured, capture
from memrewrite.capture.captured import NumberSpec, TensorSpec
from memrewrite.capture.origin import origin
from memrewrite.codegen.writer import generate
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.dropin import build, own, program_from
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.torch_internals.pytrees import tree_flatten, tree_map
from memrewrite.workload.step import Inputs
from tests.support.capture_models import CASES, Case
from tests.support.layers import images, model, x
from tests.support.models import MODELS, make

FRONT_ENDS = ("export", "dynamo")
front_ends = pytest.mark.parametrize("front_end", FRONT_ENDS)
OFFERED = [(name, fe) for name, case in CASES.items() for fe in FRONT_ENDS if fe not in case.refused]
DECLINED = [(name, fe) for name, case in CASES.items() for fe in case.refused]


def drop_in(module: nn.Module, captured: Captured) -> nn.Module:
    source, constants = generate(captured)
    return build(module, program_from(source), constants)


def run(module: nn.Module, inputs: Inputs, owner: nn.Module, leaves_train: bool) -> dict[str, Any]:
    """Everything one forward and backward of ``module`` gives; ``owner`` has the parameters and buffers."""
    torch.manual_seed(5)
    given = inputs.tensors()
    for tensor in given:
        tensor.requires_grad_(leaves_train and (tensor.is_floating_point() or tensor.is_complex()))
    with torch.set_grad_enabled(owner.training):
        flat, tree = tree_flatten(module(*inputs.args, **inputs.kwargs))
    ids = [id(out) for out in flat if isinstance(out, Tensor)]
    known = {id(t): str(n) for n, t in [*enumerate(given), *owner.named_parameters(), *owner.named_buffers()]}
    found: dict[str, Any] = {"tree": tree, "same": [known.get(i, ids.index(i)) for i in ids]}
    loss: Any = 0
    for i, out in enumerate(flat):
        found[f"output {i}"] = out.detach().clone() if isinstance(out, Tensor) else out
        if isinstance(out, Tensor):
            found[f"looks {i}"] = (out.requires_grad, out.stride(), out.dtype, out.is_leaf)
        if isinstance(out, Tensor) and out.requires_grad:
            real = (torch.view_as_real(out) if out.is_complex() else out).nan_to_num(0.0, 0.0, 0.0).double()
            loss = loss + (real * torch.linspace(0.5, 2, real.numel()).view_as(real)).sum()
    if isinstance(loss, Tensor):
        loss.backward()
    for name, tensor in [*enumerate(given), *owner.named_parameters(), *owner.named_buffers()]:
        found[f"gradient {name}"], found[f"value {name}"] = tensor.grad, tensor.detach().clone()
        tensor.grad = None
    return {**found, "random": torch.get_rng_state()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor) and isinstance(theirs[name], Tensor):
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")
        else:
            assert value is theirs[name] or value == theirs[name], name


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Everything about a model and the random state that a capture must leave alone."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    found["numpy"] = str(np.random.get_state(legacy=False))
    found["modes"] = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            items = (
                list(value.items()) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
            )
            found[f"{path}.{name}"] = repr(items), id(value)
    for i, tensor in enumerate(tensors_of(module)):
        found[f"tensor {i}"] = id(tensor), tensor.tolist(), tensor.requires_grad, id(tensor.grad), tensor._version
    return found


@pytest.mark.parametrize(("name", "front_end"), OFFERED, ids=lambda v: v)
def test_a_capture_computes_the_same_and_leaves_no_trace(name: str, front_end: str) -> None:
    case = CASES[name]
    module, twin = case.make(), case.make()
    before = snapshot(module)
    captured = capture(module, case.inputs(), front_end)
    assert snapshot(module) == before
    assert captured.front_end == front_end
    optimized = drop_in(module, captured)
    for leaves_train in (False, True):
        theirs = run(twin, case.inputs(), twin, leaves_train)
        assert_same(run(optimized, case.inputs(), module, leaves_train), theirs)


@pytest.mark.parametrize(("name", "front_end"), DECLINED, ids=lambda v: v)
def test_what_one_front_end_declines_the_other_takes(name: str, front_end: str) -> None:
    case = CASES[name]
    module = case.make()
    before = snapshot(module)
    with pytest.raises(CaptureError) as refusal:
        generate(capture(module, case.inputs(), front_end))
    assert case.refused[front_end] in str(refusal.value)
    assert snapshot(module) == before
    if front_end == "export":
        assert capture(module, case.inputs()).front_end == "dynamo"


@front_ends
@pytest.mark.parametrize("name", MODELS)
def test_the_shared_models_compute_the_same(name: str, front_end: str) -> None:
    (module, inputs), (twin, _) = make(name), make(name)
    theirs = run(twin, inputs, twin, False)
    ours = run(drop_in(module, capture(module, inputs, front_end)), inputs, module, False)
    assert_same(ours, theirs)


@front_ends
def test_a_double_precision_copy_of_weights_is_not_what_was_captured(front_end: str) -> None:
    module = model(lambda self, x: self.linear(x))
    optimized = drop_in(module, capture(module, Inputs((x(),), {}), front_end)).double()
    with pytest.warns(FallbackWarning, match=r"an input is torch\.float64|the parameters are torch\.float64"):
        optimized(x().double())


# Other sizes.


def doubled(self: Any, x: Tensor) -> Any:
    return self.linear(x).view(x.shape[0] * 2, -1)


def parity(self: Any, x: Tensor) -> Any:
    return self.linear(x) if x.shape[0] % 2 == 0 else -x


def small(self: Any, x: Tensor) -> Any:
    return self.linear(x) if x.shape[0] < 8 else -x


def one_by_one(self: Any, x: Tensor) -> Any:
    return torch.stack([self.linear(row) for row in x])


def checked(self: Any, x: Tensor) -> Any:
    torch._check(x.shape[0] < 8)
    return self.linear(x)


SIZES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "any": (doubled, (2, 3, 7), (1,)),
    "even": (parity, (2, 6), (3, 5)),
    "bounded": (small, (2, 7), (8, 9)),
    "fixed": (one_by_one, (), (3, 5)),
    "promised": (checked, (2, 7), ()),
}


@pytest.mark.parametrize("name", SIZES)
def test_other_batch_sizes_run_the_graph_where_it_is_right_and_the_original_elsewhere(name: str) -> None:
    function, fitting, others = SIZES[name]
    module = model(function)
    optimized = drop_in(module, capture(module, Inputs((x(),), {}), "export"))
    for size in (4, *fitting):
        torch.testing.assert_close(optimized(x(size, 6)), module(x(size, 6)), rtol=0, atol=0)
    for size in others:
        kept = own(optimized)
        assert kept is not None
        kept.promise.fallen_back = False
        with pytest.warns(FallbackWarning, match="captured as|another path"):
            result = optimized(x(size, 6))
        torch.testing.assert_close(result, module(x(size, 6)), rtol=0, atol=0)


def test_inputs_that_share_their_batch_size_must_go_on_sharing_it() -> None:
    module = model(lambda self, x, y: self.linear(x) + y)
    captured = capture(module, Inputs((x(), x()), {}))
    (first, *_), (second, *_) = (leaf.shape for leaf in captured.inputs.leaves)
    assert isinstance(first, str)
    assert first == second
    with pytest.warns(FallbackWarning):
        drop_in(module, captured)(x(4, 6), x(1, 6))


def test_the_batch_varies_where_other_inputs_have_none() -> None:
    """As positions have none, one for all, or one number for each of three axes first."""

    def forward(self: Any, x: Tensor, y: Tensor, table: Tensor, axes: Tensor, *once: Tensor) -> Any:
        return self.linear(x) + y + table.sum(0) + axes.sum((0, 2))[:, None] + sum(once)

    def given(batch: int) -> Inputs:
        axes = torch.arange(6 * batch).view(3, batch, 2)
        return Inputs((x(batch, 6), x(batch, 6), x(5, 6), axes, x(1, 6), x(1, 6), x(1, 6)), {})

    module = model(forward)
    captured = capture(module, given(4))
    first, second, table, third, once, *_ = (leaf.shape for leaf in captured.inputs.leaves)
    assert isinstance(first[0], str)
    assert (first, table, third[1], once) == (second, (5, 6), first[0], (1, 6))
    for batch in (2, 7):
        assert torch.equal(drop_in(module, captured)(*given(batch).args), module(*given(batch).args))


def test_the_batch_size_stays_free_where_forward_takes_any_keyword() -> None:
    module = model(lambda self, x, **options: self.linear(x) * options["scale"])
    scale = torch.tensor(2.0)
    captured = capture(module, Inputs((x(),), {"scale": scale}), "export")
    assert "forward" not in vars(module)
    optimized = drop_in(module, captured)
    for size in (4, 2, 7):
        torch.testing.assert_close(optimized(x(size, 6), scale=scale), module(x(size, 6), scale=scale), rtol=0, atol=0)


# What the data says.


def test_the_input_spec_names_the_call() -> None:
    case = CASES["keywords_and_none"]
    spec = capture(case.make(), case.inputs()).inputs
    assert spec.parameters == ("x", "mask", "scale")
    batch = spec.leaves[0].shape[0]
    assert spec.leaves == (TensorSpec(torch.float32, "cpu", (batch, 6)), None, NumberSpec(spec.numbers[0].name, 3.0))
    assert isinstance(batch, str)


@front_ends
def test_nodes_say_where_they_come_from(front_end: str) -> None:
    module, inputs = make("residual")
    graph = capture(module, inputs, front_end).graph_module.graph
    places = {origin(node).path for node in graph.nodes if node.op.startswith("call")}
    assert {"stem", "blocks.0", "blocks.0.conv", "blocks.2.bn", "head"} <= places
    own = {origin(node).line.split(":")[0] for node in graph.nodes if origin(node).path == "blocks.1"}
    assert own == {"models.py"}


@front_ends
def test_parameters_are_the_models_own_and_constants_are_apart(front_end: str) -> None:
    case = CASES["constants"]
    module = case.make()
    captured = capture(module, case.inputs(), front_end)
    parameters = dict(module.named_parameters())
    for name, parameter in captured.graph_module.named_parameters():
        assert parameter is parameters[name]
    assert not set(captured.constants) & {*parameters, *dict(module.named_buffers())}


@front_ends
def test_the_models_own_checkpoints_are_told_of(front_end: str) -> None:
    case = CASES["checkpoints"]
    captured = capture(case.make(), case.inputs(), front_end)
    assert captured.checkpoints
    assert captured.notes == ("The model's own torch.utils.checkpoint calls are replaced by the plan.",)
    without = capture(model(lambda self, x: self.linear(x)), Inputs((x(),), {}), front_end)
    assert not without.checkpoints
    assert without.notes == ()


@front_ends
def test_modes_of_every_submodule_are_kept(front_end: str) -> None:
    case = CASES["frozen_batch_norm"]
    module = case.make()
    captured = capture(module, case.inputs(), front_end)
    assert captured.training == {path: path != "norm" for path, _ in module.named_modules()}
    assert captured.graph_module.training


# The model afterwards.


def spoil(self: Any, x: Tensor) -> Any:
    random.random()  # noqa: S311  (any draw)
    np.random.rand()
    torch.manual_seed(9)
    self.linear.note = self.linear(x)
    self.counter = self.counter + 1
    self.dropout.eval()
    self.history.append(x)
    self.linear.weight.requires_grad_(False)
    raise ValueError("no further")


@front_ends
def test_a_failed_capture_leaves_no_trace(front_end: str) -> None:
    module = model(spoil, prepare=lambda m: setattr(m, "history", []))
    module.linear.weight.grad = torch.ones(6, 6)
    before = snapshot(module)
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: ValueError: no further"):
        capture(module, Inputs((x(),), {}), front_end)
    assert snapshot(module) == before


@front_ends
def test_distributions_go_on_looking_at_what_they_are_given(front_end: str) -> None:
    torch.distributions.Distribution.set_default_validate_args(True)
    module = model(lambda self, x: self.linear(x))
    capture(module, Inputs((x(),), {}), front_end)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Normal(0.0, -1.0)


@front_ends
def test_hooks_of_the_model_itself_stay_and_run_once_per_call(front_end: str) -> None:
    module, seen = model(lambda self, x: self.linear(x)), []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(1)
        return output * 2

    module.register_forward_hook(hook)
    captured = capture(module, Inputs((x(),), {}), front_end)
    assert seen == []
    optimized = drop_in(module, captured)
    assert torch.equal(optimized(x()), module(x()))
    assert len(seen) == 2


class Into(nn.Module):
    """Writes what it computes of a buffer, and of numbers alone, into other tensors."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        more = torch.add(self.scale, 1.0, out=torch.empty(4))
        result: Tensor = self.linear(x) * more + torch.eye(4, out=torch.empty(4, 4))
        return result


def test_what_is_written_out_is_no_update_of_a_buffer() -> None:
    torch.manual_seed(0)
    model, x = Into(), torch.randn(4, 4)
    captured = capture(model, Inputs((x,), {}), front_end="export")
    assert torch.equal(captured.graph_module(x)[0], model(x))


@front_ends
def test_inputs_are_left_alone(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x.add_(1)
        return self.linear(x)

    given = x()
    history = given.clone().requires_grad_().mul(1)
    for inputs in (given, history):
        version = inputs._version
        capture(model(forward), Inputs((inputs,), {}), front_end)
        assert torch.equal(inputs, x())
        assert inputs._version == version
        assert inputs.grad_fn is history.grad_fn or inputs is given


@front_ends
def test_gradients_that_are_there_stay(front_end: str) -> None:
    module = model(lambda self, x: self.linear(x))
    module.linear.weight.grad = torch.full((6, 6), 3.0)
    capture(module, Inputs((x(),), {}), front_end)
    assert module.linear.weight.grad.eq(3).all()
    assert module.linear.bias.grad is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (Inputs((), {}), "missing a required argument: 'x'"),
        (Inputs((x(), x()), {}), "too many positional arguments"),
        (Inputs((x(),), {"y": 1}), "unexpected keyword argument 'y'"),
        (Inputs((x(3, 5),), {}), "does not run on the example inputs"),
    ],
    ids=["missing", "too-many", "unknown", "shape"],
)
def test_inputs_that_do_not_fit_are_a_capture_error(arguments: Inputs, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(model(lambda self, x: self.linear(x)), arguments)


def test_captures_in_a_row_do_not_see_each_other() -> None:
    module = model(lambda self, x: self.linear(x))
    texts = {generate(capture(module, Inputs((x(),), {}), fe))[0] for fe in (*FRONT_ENDS, *FRONT_ENDS)}
    assert len(texts) == 2


def test_capture_in_the_mode_the_model_is_in() -> None:
    module = model(lambda self, x: self.norm(self.conv(x)))
    for training in (True, False):
        captured = capture(module.train(training), Inputs((images(),), {}))
        assert set(captured.training.values()) == {training}
        assert module.training is training


def test_arguments_are_known_by_their_names() -> None:
    def forward(self: Any, x: Tensor, plus: Any = None, times: Any = None, **others: Any) -> Tensor:
        result = self.linear(x)
        result = result if plus is None else result + plus
        return (result if times is None else result * times) - others["minus"] / others["over"]

    module, given = model(forward), x(4, 6)
    names = {"times": given, "minus": 2.0, "over": 3.0}
    optimized = drop_in(module, capture(module, Inputs((given,), names), "export"))
    assert torch.equal(optimized(over=3.0, minus=2.0, times=given, x=given), module(given, **names))
    with pytest.warns(FallbackWarning, match="captured for a call with x, times, minus, over"):
        assert torch.equal(optimized(given, given, minus=2.0, over=3.0), module(given, given, minus=2.0, over=3.0))


@dataclass
class Scaled:
    """What ``torch.export.register_dataclass`` is told of."""

    x: Tensor
    scale: float


def test_sizes_and_numbers_in_a_registered_dataclass_vary() -> None:
    torch.export.register_dataclass(Scaled, serialized_type_name="tests.Scaled")
    module = model(lambda self, given: Scaled(self.linear(given.x) * given.scale, given.scale))
    optimized = drop_in(module, capture(module, Inputs((Scaled(x(4, 6), 2.0),), {}), "export"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        ours, theirs = (each(Scaled(x(7, 6), 0.3)) for each in (optimized, module))
    assert torch.equal(ours.x, theirs.x)
    assert ours.scale == theirs.scale


class Mode(str, enum.Enum):  # noqa: UP042  (as transformers has them)
    FIRST, SECOND = "first", "second"


def test_an_enum_that_is_text_is_told_from_another_and_from_the_text() -> None:
    module = model(lambda self, x, mode: self.linear(x) * (2 if mode is Mode.FIRST else 3))
    optimized = drop_in(module, capture(module, Inputs((x(4, 6), Mode.FIRST), {}), "export"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert torch.equal(optimized(x(4, 6), Mode.FIRST), module(x(4, 6), Mode.FIRST))
    for other, said in ((Mode.SECOND, r"mode is <Mode.SECOND: 'second'>"), ("first", "mode is 'first'")):
        own(optimized).promise.fallen_back = False  # type: ignore[union-attr]
        with pytest.warns(FallbackWarning, match=f"{said}, captured as .*Mode 'first'"):
            assert torch.equal(optimized(x(4, 6), other), module(x(4, 6), other))


def test_tree_of_inputs_is_kept_for_nested_constants() -> None:
    case: Case = CASES["nested_inputs_and_outputs"]
    leaves = capture(case.make(), case.inputs()).inputs.leaves
    assert [type(leaf) for leaf in leaves if not isinstance(leaf, TensorSpec)] == [type(None), NumberSpec]
    assert tree_map(type, list(leaves[:1])) == [TensorSpec]


@pytest.mark.parametrize("mode", ["bilinear by size", "bilinear by factor", "trilinear", "replicate"])
def test_functions_that_have_a_deterministic_kernel_stay_functions(mode: str) -> None:
    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            if mode == "bilinear by size":
                return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=True)
            if mode == "bilinear by factor":
                return F.interpolate(y, scale_factor=1.5, mode="bilinear")
            if mode == "trilinear":
                return F.interpolate(y[None], size=(4, 9, 9), mode="trilinear")
            return F.pad(y, (1, 2, 1, 2), mode="replicate")

    module, x = Resized(), torch.randn(2, 3, 8, 8)
    captured = capture(module, Inputs((x,), {}), "export")
    function = F.pad if mode == "replicate" else F.interpolate
    assert [n.target for n in captured.graph_module.graph.nodes if n.op == "call_function"][-1] is function
    batch = torch.randn(5, 3, 8, 8)
    assert torch.equal(drop_in(module, captured)(batch), module(batch))


@front_ends
@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
def test_a_region_ends_in_the_mode_that_forward_was_called_in(front_end: str, grad: bool) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                gate = self.first(x).sigmoid()
                with torch.enable_grad():
                    gate = gate * x
            y: Tensor = self.last(x * gate)
            return y

    module, batch = Partly(), torch.randn(2, 4)
    result = drop_in(module, capture(module, Inputs((batch,), {}), front_end))
    with torch.set_grad_enabled(grad):
        assert torch.equal(result(batch), module(batch))
        assert torch.is_grad_enabled() is grad
        assert result(batch).requires_grad is grad


class Around(nn.Module):
    """What its class does around forward it does around the program, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = super().__call__(x)
        return found * 2

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(F.gelu(self.first(x)))
        return found


@front_ends
def test_what_a_class_does_around_forward_is_done_once(front_end: str) -> None:
    module, given = Around(), torch.randn(4, 8)
    captured = capture(module, Inputs((given,), {}), front_end)
    assert type(module) is Around
    assert torch.equal(drop_in(module, captured)(given), module(given))
