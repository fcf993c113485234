"""Generated code as it runs: how long activations live in it, and what passes in and out of its segments."""

import ast
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.capture import capture
from memrewrite.codegen.writer import generate
from memrewrite.plan.marks import NO_MARKS
from memrewrite.runtime.dropin import build, program_from
from memrewrite.torch_internals.fake_tensors import TorchDispatchMode
from memrewrite.workload.step import Inputs
from tests.support.layers import images, mark, model, x

front_ends = pytest.mark.parametrize("front_end", ["export", "dynamo"])


class Alive(TorchDispatchMode):
    """The most results of operators that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._alive.add(result.untyped_storage())
        self.most = max(self.most, len(self._alive))
        return result


def chain(self: Any, x: Tensor) -> Tensor:
    x = x.sin().cos().sin().cos().sin().cos()
    return x * self.scale


def chain_in_a_region(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x.sin().cos().sin().cos().sin().cos()
    return x * self.scale


def unused(self: Any, x: Tensor) -> Tensor:
    for _ in range(6):
        x.sin()
    return x * self.scale


LIFETIMES = [(chain, False), (chain, True), (chain_in_a_region, False), (unused, False), (unused, True)]


@front_ends
@pytest.mark.parametrize(("function", "segment"), LIFETIMES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_activations_die_after_their_last_use(function: Callable[..., Any], segment: bool, front_end: str) -> None:
    module, inputs = model(function), Inputs((x(),), {})
    captured = capture(module, inputs, front_end)
    marks = mark(module, inputs, captured, "sin", "mul") if segment else NO_MARKS
    optimized = build(module, program_from(generate(captured, marks=marks)[0]), {})
    with torch.no_grad(), Alive() as alive:
        optimized(*inputs.args)
    assert alive.most <= 2


def test_a_segment_keeps_its_live_ins_alone() -> None:
    module, inputs = model(chain), Inputs((x().requires_grad_(),), {})
    captured = capture(module, inputs, "export")
    marks = mark(module, inputs, captured, "sin", "mul")
    optimized = build(module, program_from(generate(captured, marks=marks)[0]), {})
    kept: list[weakref.ref[Any]] = []

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            kept.append(weakref.ref(result.untyped_storage()))
            return result

    with Seen():
        output = optimized(*inputs.args)
    assert [ref() is not None for ref in kept] == [False] * (len(kept) - 1) + [True]
    output.sum().backward()
    assert inputs.args[0].grad is not None


# Segments.


def branches(self: Any, x: Tensor) -> Any:
    first = self.linear(x)
    second = first.sigmoid()
    third = self.other(second * first)
    return third * second + first.detach(), x.shape[0] * 2


@front_ends
def test_live_ins_and_live_outs(front_end: str) -> None:
    module, inputs = model(branches), Inputs((x(),), {})
    captured = capture(module, inputs, front_end)
    places = {node.name: node for node in captured.graph_module.graph.nodes if node.op.startswith("call")}
    start = next(name for name, node in places.items() if "sigmoid" in str(node.target))
    stop = [name for name, node in places.items() if "linear" in str(node.target)][-1]
    marks = mark(module, inputs, captured, start, stop)
    source, _ = generate(captured, marks=marks)
    tree = {f.name: f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)}
    arguments = [argument.arg for argument in tree["segment_0"].args.args]
    assert arguments[:2] == ["self", "recomputing"]
    assert len(arguments) == 3
    result = tree["segment_0"].body[-1]
    assert isinstance(result, ast.Return)
    assert isinstance(result.value, ast.Tuple)
    assert len(result.value.elts) == 2
    optimized = build(module, program_from(source), {})
    (ours, size), (theirs, _) = optimized(x()), module(x())
    assert size == 8
    assert torch.equal(ours, theirs)
    for loss in (ours, theirs):
        loss.sum().backward()
    gradient = module.linear.weight.grad
    assert gradient is not None
    module.zero_grad()
    module(x())[0].sum().mul(2).backward()
    assert torch.allclose(gradient, module.linear.weight.grad)


def test_a_segment_without_results_runs() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.norm(self.conv(x))
        return self.scale * 2

    module, inputs = model(forward), Inputs((images(),), {})
    captured = capture(module, inputs, "export")
    marks = mark(module, inputs, captured, "conv2d", "batch_norm")
    source, _ = generate(captured, marks=marks)
    assert "\n    run_segment(segment_0, self, x, random=False, reads=(" in source
    build(module, program_from(source), {})(images()).backward()
    assert module.norm.num_batches_tracked == 1
    assert not module.norm.running_mean.eq(0).all()


class Recurrent(nn.Module):
    """Two layers of GRUs, each beside what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(32, 32, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_weights_that_a_layer_reads_in_each_step_are_cast_once(amp: str | None) -> None:
    torch.manual_seed(0)
    report = memrewrite.optimize(Recurrent(), torch.randn(16, 24, 32), budget="min", amp=amp).report
    assert report.segments
    assert report.predicted_after.peak < report.predicted_before.peak
    assert "bit-equal" in report.verdict
