"""The random state of all that Python code draws from stays as it is, whatever draws meanwhile."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.state.random_state import RandomState, draws, preserved_everywhere, preserved_rng, seed_all


def draw() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]  # noqa: S311


def test_what_is_drawn_inside_is_drawn_again_after_it() -> None:
    for preserved in (preserved_rng([torch.ones(1)]), preserved_everywhere()):
        with preserved:
            inside = draw()
        assert draw() == inside


def test_a_state_comes_back_as_often_as_it_is_asked_for() -> None:
    state = RandomState()
    first, before = draw(), draws()
    assert draws() != draws_of(state)
    state.restore()
    assert (draw(), draws()) == (first, before)


def draws_of(state: RandomState) -> list[Any]:
    with preserved_everywhere():
        state.restore()
        return draws()


def test_seeds_are_those_of_python_and_pytorch() -> None:
    with preserved_everywhere():
        seed_all(3, [])
        first = random.random(), torch.rand(1).item()  # noqa: S311
        seed_all(3, [])
        assert (random.random(), torch.rand(1).item()) == first  # noqa: S311


def test_a_loss_that_draws_leaves_every_state_as_it_is() -> None:
    def loss(output: Tensor) -> Tensor:
        return output.sum() * (np.random.rand() + random.random() + 1)  # noqa: S311

    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    before = draws()
    memrewrite.optimize(model, torch.ones(64, 8), budget="min", loss_fn=loss)
    assert draws() == before
