"""What a model does only while it is traced, and what a trace asserts, must not reach the drop-in."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memrewrite
from memrewrite.capture import capture
from memrewrite.capture.autocasts import autocast_asked
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.workload.step import Inputs, autocast
from tests.capture.test_capture import drop_in, front_ends
from tests.support.layers import model, x


def bound(self: Any, x: Tensor) -> Any:
    """Other numbers while it is traced."""
    hidden = self.linear(x)
    return hidden if torch.compiler.is_compiling() or torch.compiler.is_exporting() else hidden * 2


def mapped(self: Any, x: Tensor) -> Any:
    """The same numbers either way; what it does otherwise no graph can hold."""
    return self.linear(x) if torch.compiler.is_compiling() else torch.vmap(self.linear)(x)


def test_a_model_that_asks_whether_it_is_traced_is_captured_as_it_always_runs() -> None:
    module = model(bound)
    captured = capture(module, Inputs((x(),), {}))
    assert captured.front_end == "export"
    assert captured.notes == ()
    assert torch.equal(drop_in(module, captured)(x()), module(x()))


@front_ends
def test_what_can_be_captured_only_of_a_model_that_is_told_is_told_to_the_user(front_end: str) -> None:
    module = model(mapped)
    captured = capture(module, Inputs((x(),), {}), front_end)
    assert "asks whether it is being traced (in tests.capture.test_tracing)" in captured.notes[0]
    torch.testing.assert_close(drop_in(module, captured)(x()), module(x()))


def test_casts_inside_a_region_without_autocast_bear_autocast_around_it() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        hidden = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            wide = hidden.to(torch.float64).sin()
        return self.other(wide.float())

    module = model(forward)
    optimized = drop_in(module, capture(module, Inputs((x(),), {}), "export"))
    with autocast(torch.bfloat16, "cpu"):
        assert torch.equal(optimized(x()), module(x()))


def test_whether_something_is_traced_is_asked_as_before_afterwards() -> None:
    capture(model(bound), Inputs((x(),), {}))
    assert not torch.compiler.is_compiling()
    assert torch.compile(torch.compiler.is_compiling, backend="eager", fullgraph=True)()
    assert torch.equal(torch.export.export(model(bound), (x(),)).module()(x()), model(bound)(x()) / 2)


def asking(self: Any, x: Tensor) -> Any:
    """Products that autocast must not narrow, as transformers writes them."""
    with torch.no_grad():
        on = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if on else contextlib.nullcontext():
            angles = x @ x.T
    return self.other(self.linear(x).relu()) * angles.cos().sum()


@front_ends
@pytest.mark.parametrize("amp", [torch.bfloat16, None], ids=["autocast", "without"])
def test_a_model_that_asks_about_autocast_is_told_what_holds_in_the_step(
    front_end: str, amp: torch.dtype | None
) -> None:
    module = model(asking)
    captured = capture(module, Inputs((x(),), {}), front_end, amp)
    assert captured.autocast == amp
    optimized = drop_in(module, captured)
    with autocast(amp, "cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(optimized(x()), module(x()))
    other = torch.bfloat16 if amp is None else None
    with autocast(other, "cpu"), pytest.warns(FallbackWarning, match="it depends on autocast, which casts to"):
        assert torch.equal(optimized(x()), module(x()))


def test_a_model_that_asks_about_autocast_is_optimized_for_its_step() -> None:
    module = model(asking)
    optimized = memrewrite.optimize(module, x(), amp="bf16", budget="min")
    assert optimized.report.verdict.startswith("bit-equal")


def typed(self: Any, x: Tensor) -> Any:
    """A norm in float32 that returns the type it was given, as those of queries and keys do."""
    hidden = self.linear(x)
    return self.other(hidden.float().tanh().to(hidden.dtype)).relu()


def moved(self: Any, x: Tensor) -> Any:
    """What is moved keeps its type, which a graph names."""
    return self.other(x) + self.linear(x).to(x.device).relu()


def typed_as(self: Any, x: Tensor) -> Any:
    hidden = self.linear(x)
    return self.other(hidden.float().tanh().to(hidden)) + hidden.float().sin().type_as(hidden)


@front_ends
@pytest.mark.parametrize("amp", [torch.bfloat16, None], ids=["autocast", "without"])
@pytest.mark.parametrize("forward", [typed, moved, typed_as])
def test_types_that_a_model_asks_for_are_those_of_the_step(
    front_end: str, amp: torch.dtype | None, forward: Callable[..., Any]
) -> None:
    module = model(forward)
    captured = capture(module, Inputs((x(),), {}), front_end, amp)
    assert captured.autocast == amp
    optimized = drop_in(module, captured)
    for kind in (amp, torch.bfloat16 if amp is None else None):
        with autocast(kind, "cpu"), warnings.catch_warnings():
            warnings.simplefilter("error" if kind == amp else "ignore")
            assert torch.equal(optimized(x()), module(x()))


@front_ends
@pytest.mark.parametrize("amp", [torch.bfloat16, None], ids=["autocast", "without"])
def test_what_does_not_depend_on_autocast_is_right_with_it_and_without(front_end: str, amp: torch.dtype | None) -> None:
    module = model(lambda self, x: self.other(self.linear(x).relu()).float())
    captured = capture(module, Inputs((x(),), {}), front_end, amp)
    assert captured.autocast == "any"
    optimized = drop_in(module, captured)
    for kind in (torch.bfloat16, None):
        with autocast(kind, "cpu"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(optimized(x()), module(x()))


def test_who_asks_about_autocast_is_told_the_truth() -> None:
    with autocast(torch.bfloat16, "cpu"), autocast_asked() as asked:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")
        assert asked == [__name__] * 3
        assert torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_no_code_is_made_of_a_graph_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = fx.Graph.python_code

    def noted(graph: fx.Graph, *rest: Any, **options: Any) -> Any:
        made.append(len(graph.nodes))
        return make(graph, *rest, **options)

    monkeypatch.setattr(fx.Graph, "python_code", noted)
    captured = capture(model(bound), Inputs((x(),), {}), "export")
    assert len(captured.graph_module.graph.nodes) > 1
    assert not any(made)  # of an empty one, which tells the names that every graph has


@pytest.mark.parametrize("asks", [False, True])
def test_where_autocast_casts_inputs_may_be_of_another_type_unless_forward_asks_for_it(asks: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers(x)
            return result * 2 if asks and x.dtype == torch.bfloat16 else result

    net, given = Net(), torch.randn(4, 8)
    planned = memrewrite.optimize(copy.deepcopy(net), given, budget="min", amp=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(given), planned(given))
        with pytest.warns(FallbackWarning, match="captured as torch.float32") if asks else contextlib.nullcontext():
            assert torch.equal(net(given.bfloat16()), planned(given.bfloat16()))
