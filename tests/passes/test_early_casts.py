"""Casts for products are spelled out where autocast makes them: every bit stays, and segments keep what is narrow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memrewrite
from memrewrite.capture import capture
from memrewrite.observe.effects import observe
from memrewrite.passes import early_casts
from memrewrite.passes.functionalize import Functionalize
from memrewrite.plan.marks import Marks, NodeMark
from memrewrite.runtime.segment import as_autocast
from memrewrite.search.asked import Asked
from memrewrite.search.candidate import Candidate
from memrewrite.simulate import Timeline
from memrewrite.workload.step import Inputs
from tests.passes.helpers import FRONT_ENDS, Around, assert_same_bits, example, numbers, targets

Function = Callable[[Any, Tensor], Any]

# Functions of a product's result, and how many casts they have.
CASES: dict[str, tuple[Function, int]] = {
    "residual": (lambda m, x: m.linear(x.float() + 1), 1),
    "both operands": (lambda m, x: torch.mm(x.float() + 1, (x.float() - 1).t()), 2),
    "several products": (lambda m, x: (lambda y: torch.matmul(y.t(), y) + torch.matmul(y.t(), y))(x.float() + 1), 2),
    "the same tensor twice": (lambda m, x: (lambda y: torch.matmul(y, y))(x.float()[:, :5] + 1), 0),
    "narrow already": (lambda m, x: m.linear(x + 1), 0),
    "no product": (lambda m, x: (x.float() + 1).exp(), 0),
}


def captured(model: nn.Module, x: Tensor, front_end: str = "export") -> fx.GraphModule:
    """The graph of ``model``, functionalized."""
    torch.compiler.reset()
    graph_module = capture(model, Inputs((x,), {}), front_end).graph_module
    Functionalize()(graph_module, observe(graph_module, [x]))
    return graph_module


def cast_early(model: nn.Module, x: Tensor, front_end: str = "export") -> fx.GraphModule:
    """The graph of ``model`` with its casts under autocast spelled out."""
    graph_module = captured(model, x, front_end)
    early_casts.insert(graph_module, observe(graph_module, [x], torch.bfloat16))
    return graph_module


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("amp", [True, False], ids=["autocast", "without"])
def test_every_bit_stays(name: str, front_end: str, amp: bool) -> None:
    function, casts = CASES[name]
    model, x = Around(function), example()
    graph_module = cast_early(model, x, front_end)
    assert targets(graph_module).count("as_autocast") == casts
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


def test_a_second_time_nothing_is_left_to_cast() -> None:
    model, x = Around(CASES["residual"][0]), example()
    graph_module = cast_early(model, x)
    before = graph_module.code
    early_casts.insert(graph_module, observe(graph_module, [x], torch.bfloat16))
    assert graph_module.code == before


def test_what_autocast_leaves_alone_is_not_cast() -> None:
    model, x = Around(lambda m, x: m.linear(x.double() + 1)).double(), example().double()
    assert "as_autocast" not in targets(cast_early(model, x))


@pytest.mark.parametrize(("of_cast", "left"), [((), 1), ((0,), 0)], ids=["before its segment", "in it"])
def test_a_cast_in_the_segment_of_its_product_goes(of_cast: tuple[int, ...], left: int) -> None:
    model, x = Around(CASES["residual"][0]), example()
    graph_module = cast_early(model, x)
    (cast,) = (node for node in graph_module.graph.nodes if node.target is as_autocast)
    (product,) = cast.users
    marks = Marks(((product.name, NodeMark((0,))), (cast.name, NodeMark(of_cast))))
    assert early_casts.drop_needless(graph_module, marks) == (left == 0)
    assert targets(graph_module).count("as_autocast") == left
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


class Straight(Around):
    """``function(self, x)`` of the input itself."""

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


# Functions of an input in float32, the segments of their products, and how many casts of it come before these.
OF_INPUTS: dict[str, tuple[Function, list[tuple[int, ...]], int]] = {
    "read by more": (lambda m, x: m.linear(x) + x.exp(), [(0,)], 0),
    "read by one product": (lambda m, x: m.linear(torch.mm(x, m.linear.weight)), [(0, 1), (0, 2)], 1),
    "read by two": (lambda m, x: m.linear(x) + torch.mm(x, m.linear.weight), [(0,), (1,)], 0),
    "in no segment": (lambda m, x: m.linear(x), [()], 0),
}


@pytest.mark.parametrize("name", OF_INPUTS)
def test_an_input_is_cast_before_the_segment_of_the_one_product_that_reads_it(name: str) -> None:
    function, segments, casts = OF_INPUTS[name]
    model, x = Straight(function), example()
    graph_module = captured(model, x)
    effects = observe(graph_module, [x], torch.bfloat16)
    before = graph_module.code
    products = [
        node for node in graph_module.graph.nodes if str(node.target) in ("aten.mm.default", "aten.linear.default")
    ]
    marks = Marks(tuple((node.name, NodeMark(segment)) for node, segment in zip(products, segments, strict=True)))
    assert early_casts.insert_for_inputs(graph_module, effects, marks) == (casts > 0)
    assert targets(graph_module).count("as_autocast") == casts
    assert (graph_module.code != before) == (casts > 0)
    early_casts.drop_needless(graph_module, marks)
    assert targets(graph_module).count("as_autocast") == casts
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


class Block(nn.Module):
    """ConvNeXt's: its scale in float32 makes the sums that the convolutions read float32 too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(nn.functional.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


def optimized(monkeypatch: pytest.MonkeyPatch, early: bool, compiled: bool = False) -> Any:
    """A net of such blocks at its lowest peak under autocast."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 16, 4, 4), *(Block(16) for _ in range(6))), torch.randn(2, 3, 64, 64)
    if not early:
        monkeypatch.setattr(early_casts, "insert", lambda graph_module, effects: False)
    options: Any = {"budget": "min", "amp": "bf16", "exact": True, "compiled": compiled, "loop": "drop-output"}
    return memrewrite.optimize(model, x, verify=early, **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_lowest_peak_is_lower(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    early = optimized(monkeypatch, True, compiled)
    late = optimized(monkeypatch, False, compiled)
    assert early.report.verdict.startswith("bit-equal")
    assert early.report.predicted_after.peak < 0.97 * late.report.predicted_after.peak
    assert "as_autocast(" in early._memrewrite.source


@pytest.mark.parametrize("worth", [0, 512], ids=["of no use", "of use"])
def test_needless_casts_stay_where_the_peak_is_lower_with_them(monkeypatch: pytest.MonkeyPatch, worth: int) -> None:
    """As it was for MetaFormer, whose gradients were cast in another order without them, above the budget."""
    seen: set[int] = set()
    simulate, finished = Candidate.simulate, Asked.finished

    def with_worth(candidate: Candidate, blocks: bool = True) -> Timeline:
        timeline, casts = simulate(candidate, blocks), candidate.programs[0].count(" = as_autocast(")
        seen.add(casts)
        return replace(timeline, peak=timeline.peak - worth * casts)

    def watched(asked: Asked, candidate: Candidate) -> Candidate:
        with monkeypatch.context() as patch:
            patch.setattr(Candidate, "simulate", with_worth)
            return finished(asked, candidate)

    monkeypatch.setattr(Asked, "finished", watched)
    result = optimized(monkeypatch, True)
    after, before = sorted(seen)
    assert result._memrewrite.source.count(" = as_autocast(") == (before if worth else after)
    assert result.report.verdict.startswith("bit-equal")


def test_a_step_that_fits_is_left_alone() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), Block(4)), torch.randn(2, 3, 8, 8)
    result = memrewrite.optimize(model, x, budget="1GB", amp="bf16")
    assert "as_autocast" not in getattr(getattr(result, "_memrewrite", None), "source", "")
