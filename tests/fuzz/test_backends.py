"""Random models through the partitioner of the back end: the numbers of PyTorch's own, bit for bit.

pytest -m fuzz tests/fuzz/test_backends.py --examples 100
"""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.workload.step import default_loss
from tests.fuzz.check import PARTS, private
from tests.fuzz.strategies import Recipe, make, recipes
from tests.fuzz.test_fuzz import ANY_TIME, SAME
from tests.support.divided import Divided, gradients

BUDGETS = st.one_of(st.just("min"), st.floats(0.3, 0.95))


class Trained(nn.Module):
    """A model and its loss, as one graph has them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return default_loss(self.model(*inputs))


def numbers(divided: Divided, x: Tensor) -> list[Tensor]:
    """The loss, gradients and buffers after a step, with the same random numbers of Python's each time."""
    random.seed(0)
    loss = divided.step(x)
    return [loss, *gradients(divided.model), *(buffer.clone() for buffer in divided.model.buffers())]


def divide_one(recipe: Recipe, budget: Any) -> None:
    model, inputs = make(recipe)
    usual, ours = Trained(copy.deepcopy(model)), Trained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = Divided(usual, None)
        try:
            expected = numbers(stock, *private(inputs).args)
        except (RuntimeError, ValueError):  # the original fails, or has no gradient
            return
        share = budget if budget == "min" else int(budget * stock.peak)
        divided = Divided(ours, share)
        try:
            found = numbers(divided, *private(inputs).args)
        except BudgetInfeasibleError:
            return
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("examples", [10, 40])
def test_the_same_random_models_every_time(examples: int) -> None:
    settings(SAME, max_examples=examples)(given(recipes(longest=9), BUDGETS)(divide_one))()


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_other_random_models_every_time(part: int, request: pytest.FixtureRequest) -> None:
    examples = -(-request.config.getoption("--examples") // PARTS)
    settings(ANY_TIME, max_examples=examples, print_blob=True)(given(recipes(), BUDGETS)(divide_one))()
