"""Copies of objects that a run may write: what is copied, and what stays the caller's."""

import random
import threading
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.state.objects import Copies, alone


@dataclass
class Layer:
    keys: Tensor
    seen: int = 0


@dataclass(slots=True)
class Slotted:
    layers: list[Layer] = field(default_factory=list)


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer(torch.ones(2)), Layer(torch.zeros(2))]
        self.first = self.layers[0]
        self.write = self.layers[1].__init__  # type: ignore[misc]
        self.named = UserDict[str, Any](layer=self.first)
        self.slotted = Slotted(self.layers)
        self.itself = self


def test_nothing_that_a_copy_holds_is_written_in_the_original() -> None:
    cache = Cache()
    copied = Copies(alone).of(cache)
    assert type(copied) is Cache
    copied.layers[0].keys.add_(1)
    copied.layers[0].seen = 5
    copied.write(torch.full((2,), 3.0), 7)
    copied.named["more"] = 1
    assert torch.equal(cache.layers[0].keys, torch.ones(2))
    assert (cache.layers[0].seen, cache.layers[1].seen, dict(cache.named)) == (0, 0, {"layer": cache.first})
    assert torch.equal(cache.layers[1].keys, torch.zeros(2))
    assert copied.layers[1].seen == 7
    assert copied.first is copied.layers[0]
    assert copied.named["layer"] is copied.first
    assert copied.slotted.layers is copied.layers
    assert copied.itself is copied


class Ended:
    def __del__(self) -> None:
        """As what closes a file."""


@pytest.mark.parametrize(
    "value",
    [nn.Linear(2, 2), threading.Lock(), Ended(), len, Tensor.add, torch.float32, iter([1])],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_told_apart_stays_the_caller_s(value: Any) -> None:
    held = Layer(value)
    assert Copies(alone).of(value) is value
    assert Copies(alone).of(held).keys is value


def test_tensors_stay_where_they_are_inputs_or_gather_gradients() -> None:
    given, trained, kept = torch.ones(1), torch.ones(1, requires_grad=True), trained_twice()
    layers = Copies(alone, [given]).of((Layer(given), Layer(trained), Layer(kept)))
    assert layers[0].keys is given
    assert layers[1].keys is trained
    assert torch.equal(layers[2].keys, kept)
    assert layers[2].keys.grad_fn is None


def trained_twice() -> Tensor:
    return torch.ones(1, requires_grad=True) * 2


def test_generators_draw_the_same_in_each_copy() -> None:
    for made, draw in (
        (random.Random(3), lambda generator: generator.random()),  # noqa: S311
        (torch.Generator().manual_seed(3), lambda generator: torch.rand(1, generator=generator).item()),
    ):
        first, second = (draw(Copies(alone).of(made)) for _ in range(2))
        assert first == second == draw(made)
