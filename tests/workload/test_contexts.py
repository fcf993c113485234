"""Contexts of the caller's in which no step of ours is what it would be outside of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memrewrite

bfloat16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("context", "sentence"),
    [
        (torch.no_grad, "Gradients are off here"),
        (torch.inference_mode, "Gradients are off here"),
        (bfloat16, "Autocast is on here; leave its context first, and give amp='bf16'"),
    ],
    ids=["no_grad", "inference_mode", "autocast"],
)
@pytest.mark.parametrize("call", [memrewrite.optimize, memrewrite.measure, memrewrite.estimate])
def test_a_training_step_is_refused_where_it_would_be_another(
    call: Any, context: Callable[[], AbstractContextManager[Any]], sentence: str
) -> None:
    model, x = net(), torch.randn(2, 8)
    with context(), pytest.raises(memrewrite.UsageError, match=sentence):
        call(model, x)
    call(model, x)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_inference_needs_no_gradients(context: Callable[[], AbstractContextManager[Any]]) -> None:
    model, x = net().eval(), torch.randn(2, 8)
    with context():
        result = memrewrite.optimize(model, x, budget="min")
        assert torch.equal(result(x), model(x))
        assert memrewrite.verify(model, result, x).exact


class Cached(nn.Module):
    """Keeps a tensor from its first call on, as models do of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(8.0).cos()
        gate = self.inner(x) * self.table
        return gate * torch.sigmoid(gate)


@pytest.mark.parametrize("made", ["input", "model", "cache"])
def test_what_was_made_in_inference_mode_is_taken_outside_of_it(made: str) -> None:
    with torch.inference_mode(made == "model"):
        model = Cached().eval()
    with torch.inference_mode(made == "input"):
        x = torch.randn(64, 8)
    with torch.inference_mode(made != "input"), torch.no_grad():
        model(x)
    result = memrewrite.optimize(model, x, budget="min")
    assert memrewrite.verify(model, result, x).equivalent
    assert memrewrite.estimate(model, x).peak.bytes == memrewrite.measure(model, x).peak
    assert memrewrite.measure(result, x).peak < memrewrite.measure(model, x).peak
