"""A branch that clamps what is not finite is always taken, which changes nothing of what is; no other branch is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.capture import capture
from memrewrite.records.errors import CaptureError
from memrewrite.workload.step import Inputs
from tests.support.dropins import segmented
from tests.support.layers import model, x
from tests.support.steps import assert_right


def clamped(hidden: Tensor) -> Tensor:
    most = torch.finfo(hidden.dtype).max - 1000
    return torch.clamp(hidden, min=-most, max=most)


def asks_for_finite(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x).tanh()
    if self.training and not torch.isfinite(hidden).all():
        hidden = clamped(hidden)
    return self.other(hidden).tanh() + hidden


def asks_for_infinite(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x).tanh()
    if torch.isinf(hidden).any() or torch.isnan(hidden).any():
        hidden = clamped(hidden)
    return self.other(hidden).tanh() + hidden


def narrow(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    return hidden if torch.isfinite(hidden).all() else hidden.clamp(-1e4, 1e4)


def of_another(self: Any, x: Tensor) -> Tensor:
    hidden, other = self.linear(x), self.other(x)
    if not torch.isfinite(hidden).all():
        hidden = clamped(other)
    return hidden + other


def beside(self: Any, x: Tensor) -> Tensor:
    hidden, other = self.linear(x), self.other(x)
    if not torch.isfinite(hidden).all():
        other = clamped(hidden)
    return hidden.sin() + other


def written(self: Any, x: Tensor) -> Tensor:
    hidden = before = self.linear(x)
    if not torch.isfinite(hidden).all():
        hidden = clamped(hidden)
    hidden.add_(1)
    return hidden * before


def doing_more(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    return hidden if torch.isfinite(hidden).all() else clamped(hidden) * 2


def of_one_number(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    return hidden * 2 if torch.isfinite(hidden.sum()) else hidden


def not_in_full(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    return clamped(hidden) if torch.isnan(hidden).any() else hidden


def both_at_once(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    return clamped(hidden) if torch.isinf(hidden).any() and torch.isnan(hidden).any() else hidden


def returning(self: Any, x: Tensor) -> Tensor:
    hidden: Tensor = self.linear(x)
    other: Tensor = self.other(x)
    return hidden if torch.isfinite(hidden).all() else other


def raising(self: Any, x: Tensor) -> Tensor:
    hidden: Tensor = self.linear(x)
    assert torch.isfinite(hidden).all()
    return hidden


@pytest.mark.parametrize("forward", [asks_for_finite, asks_for_infinite])
def test_what_is_finite_is_what_it_was(forward: Callable[..., Tensor]) -> None:
    module = model(forward)
    optimized, _ = assert_right(module, lambda k: Inputs((x(),), {}))
    report = memrewrite.report_of(optimized)
    assert report is not None
    assert report.config["regions"] == [""]
    code = capture(module, Inputs((x(),), {})).graph_module.code
    assert "clamp" in code
    assert not any(word in code for word in ("all", "any", "isfinite", "isinf", "abs"))


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_clamped(number: float) -> None:
    module = model(asks_for_finite)
    with torch.no_grad():
        module.get_parameter("linear.bias")[0] = number
    module.tanh = nn.Identity()
    results = []
    for each in (copy.deepcopy(module), segmented(copy.deepcopy(module), x()).module):
        given = x().requires_grad_(True)
        found = each(given)
        found.sum().backward()
        results.append([found.detach(), given.grad, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


OTHERS = [narrow, of_another, beside, written, doing_more, not_in_full, both_at_once, returning, raising]


@pytest.mark.parametrize("forward", OTHERS)
def test_other_branches_are_refused(forward: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"decide what Python does at test_finite.py:\d+ \(whether all are finite\)"):
        capture(model(forward), Inputs((x(),), {}))


def test_what_one_number_decides_is_refused_as_ever() -> None:
    with pytest.raises(CaptureError, match="lets the values of a tensor decide"):
        capture(model(of_one_number), Inputs((x(),), {}))
