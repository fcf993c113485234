"""Bugs that models of the zoo showed, each with a small model that has what it takes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.simulate import run_tracked, simulate
from memrewrite.step import Inputs, Step


class Experts(nn.Module):
    """Mixtral: experts by grouped matrix products in float32, whose shape rule speaks of bfloat16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 64) / 8)
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (x.shape[0] // 4)
        for _ in range(8):
            x = torch.tanh(functional.grouped_mm(x, self.weight, offs=ends))
        return self.head(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "grouped_mm": (Experts, lambda: torch.randn(256, 64)),
}


@pytest.mark.parametrize(("make", "example"), MODELS.values(), ids=MODELS)
def test_verified_within_eighty_percent_of_the_activations(
    make: Callable[[], nn.Module], example: Callable[[], Tensor]
) -> None:
    torch.manual_seed(0)
    model, inputs = make(), Inputs((example(),), {})
    step = Step(optimizer=torch.optim.AdamW)
    before = simulate(model, inputs, step)
    budget = int(before.floor + 0.8 * (before.peak - before.floor))
    result = memrewrite.optimize(model, inputs.args, budget=budget)
    assert result.report.equivalent
    assert result.report.predicted_after.peak <= budget
    assert run_tracked(result, inputs, step).peak == result.report.predicted_after.peak
