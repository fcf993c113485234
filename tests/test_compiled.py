"""Plans for a result that will be compiled: only what ``torch.compile`` honours."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.errors import BudgetInfeasibleError
from tests.benchmarks.models import WORKLOADS
from tests.compiled import compiled_bytes
from tests.dropins import loss_of, step
from tests.models import ResidualNet
from tests.test_kept import Block


@dataclass(frozen=True)
class Case:
    """A model, its input and a budget, and ``word`` for what of the usual plan ``torch.compile`` does not honour."""

    build: Callable[[], nn.Module]
    x: Tensor
    budget: str
    word: str


NESTED, KEPT = "segments in segments", "nodes kept"
CASES = {
    NESTED: Case(lambda: ResidualNet(4, 8), torch.randn(8, 3, 16, 16), "min", "within=recomputing"),
    KEPT: Case(
        lambda: nn.Sequential(*(Block(16, 0.0) for _ in range(4))), torch.randn(2, 128, 16), "65%", "keep(recomputing"
    ),
}


@functools.cache
def optimized(name: str, compiled: bool, budget: int | None = None) -> Any:
    """The model of ``CASES``, seeded, within its budget or another one."""
    case = CASES[name]
    torch.manual_seed(0)
    limit = case.budget if budget is None else budget
    return memrewrite.optimize(case.build(), case.x, budget=limit, optimizer="sgd", verify=False, compiled=compiled)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_for_the_compiler_has_what_it_honours_and_no_more(name: str) -> None:
    planned, usual = optimized(name, compiled=True), optimized(name, compiled=False)
    assert (planned.report.config["compiled"], usual.report.config["compiled"]) == (True, False)
    assert CASES[name].word in usual._memrewrite.source
    assert not re.search(r"within=recomputing|keep\(recomputing", planned._memrewrite.source)
    assert {segment.depth for segment in planned.report.segments} == {1}


@pytest.mark.parametrize("name", CASES)
def test_compiled_it_computes_the_same(name: str) -> None:
    result, x = optimized(name, compiled=True), CASES[name].x
    torch.compiler.reset()
    compiled: Any = torch.compile(result, backend="aot_eager", fullgraph=True)
    found, expected = step(result, x, lambda module, x: compiled(x)), step(result, x)
    torch.compiler.reset()
    del found["random"], expected["random"]
    torch.testing.assert_close(found, expected)


def beyond_plan(result: Any, x: Tensor) -> float:
    """The peak as compiled as a share of the planned one, parameters, buffers and inputs aside."""
    outside = sum(tensor.nbytes for tensor in [x, *result.parameters(), *result.buffers()])
    found = compiled_bytes(result, lambda module: loss_of(module(x)))
    return found.peak / (result.report.predicted_after.peak - outside)


def test_compiled_it_holds_what_was_planned_and_segments_in_segments_do_not() -> None:
    planned, usual = optimized(NESTED, compiled=True), optimized(NESTED, compiled=False)
    assert usual.report.predicted_after.peak < planned.report.predicted_after.peak
    assert beyond_plan(planned, CASES[NESTED].x) <= 1.02 < beyond_plan(usual, CASES[NESTED].x)


def test_compiled_it_holds_what_was_planned_across_skip_connections() -> None:
    torch.manual_seed(0)
    model, x = WORKLOADS["unet"].build(True), torch.randn(4, 3, 64, 64)
    result = memrewrite.optimize(model, x, budget="min", optimizer="none", verify=False, compiled=True)
    assert beyond_plan(result, x) <= 1.02


def test_a_budget_that_only_segments_in_segments_reach() -> None:
    low = optimized(NESTED, compiled=False).report.predicted_after.peak
    said = (
        r"No plan for torch\.compile fits .*: the lowest reachable peak is .*; uncompiled it may be lower\. What else"
    )
    with pytest.raises(BudgetInfeasibleError, match=said) as caught:
        optimized(NESTED, compiled=True, budget=low)
    assert caught.value.lowest == optimized(NESTED, compiled=True).report.predicted_after.peak > low
    assert caught.value.options
