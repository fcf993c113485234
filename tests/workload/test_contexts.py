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
