"""Graphs of a step that have no backward, such as frozen layers before the graph breaks: nothing can be chosen, but
what they take is part of the step's peak."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.backends import entry
from memrewrite.records.errors import BudgetInfeasibleError

ROWS, WIDE = 1_024, 512
HIDDEN = ROWS * WIDE * 4


class Frozen(nn.Module):
    """A trained head on features of frozen layers, whose graph breaks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(32, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 32))
        self.features.requires_grad_(False)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        torch._dynamo.graph_break()
        return self.head(x).mean()


def compiled(budget: str | int) -> Any:
    torch._dynamo.reset()
    model = Frozen()
    return torch.compile(model, backend=entry.memrewrite, options={"budget": budget, "optimizer": "none"})


def test_what_a_graph_without_backward_takes_is_part_of_the_step() -> None:
    model, x = compiled("min"), torch.randn(ROWS, 32)
    for _ in range(2):
        model(x).backward()
    report: Any = memrewrite.report_of(model)
    features, head = report.graphs
    assert features.choice == "no backward"
    there = sum(each.nbytes for each in (*model.parameters(), x))
    assert features.peak == pytest.approx(there + 2 * HIDDEN, rel=0.01)
    assert report.peak == features.peak > 1.5 * head.peak


def test_evaluation_is_told_of_and_no_part_of_the_step() -> None:
    model = compiled("min")
    model(torch.randn(ROWS, 32)).backward()
    peak = memrewrite.report_of(model).peak
    with torch.no_grad():
        model(torch.randn(8 * ROWS, 32))
    report: Any = memrewrite.report_of(model)
    assert max(graph.peak for graph in report.graphs if graph.choice == "no gradients") > 4 * peak
    assert report.peak == peak


def test_a_step_whose_graph_without_backward_is_above_the_budget_is_refused() -> None:
    model = compiled(3 * HIDDEN // 2)
    with pytest.raises(BudgetInfeasibleError, match="the lowest reachable peak is") as refused:
        model(torch.randn(ROWS, 32))
    assert refused.value.lowest is not None
    assert refused.value.lowest > 2 * HIDDEN
