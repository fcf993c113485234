"""Functions that keep what they made give real tensors after a model ran on tensors without data."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.api import optimize
from memrewrite.capture import capture
from memrewrite.simulate import run_tracked, simulate
from memrewrite.workload.step import Inputs, Step


def positions(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device, dtype=torch.float32).unsqueeze(-1)


def in_pairs(length: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    return positions(length, device), {"half": positions(length, device) / 2}


class Placed(nn.Module):
    """Adds positions that a function has for each length, as RT-DETR has its anchors."""

    def __init__(self, made: Callable[..., Any]) -> None:
        super().__init__()
        self.made, self.layers = made, nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        found = self.made(x.shape[1], x.device)
        result: Tensor = self.layers(x + (found if isinstance(found, Tensor) else found[0] + found[1]["half"]))
        return result


KEPT = {
    "some": functools.lru_cache(maxsize=4)(positions),
    "all": functools.cache(positions),
    "several": functools.lru_cache(in_pairs),
}


@pytest.mark.parametrize("how", KEPT)
def test_a_real_step_follows_a_simulated_one(how: str) -> None:
    KEPT[how].cache_clear()
    module, inputs = Placed(KEPT[how]), Inputs((torch.randn(8, 12, 16),), {})
    simulated = simulate(module, inputs, Step())
    assert simulated.peak == run_tracked(module, inputs, Step()).peak
    capture(module, inputs)
    assert type(module(*inputs.args)) is Tensor
    assert KEPT[how].cache_info().currsize == 1  # what is real stays
    simulate(module, inputs, Step())
    assert KEPT[how].cache_info().currsize == 1


def test_another_model_of_the_class_runs_after_one_is_optimized() -> None:
    KEPT["some"].cache_clear()
    optimize(Placed(KEPT["some"]), torch.randn(8, 12, 16), budget="min", optimizer="sgd")
    other = Placed(KEPT["some"])
    other(torch.randn(8, 12, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
