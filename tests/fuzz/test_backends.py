"""Random models through the partitioner of the back end: the numbers of PyTorch's own, bit for bit.

pytest -m fuzz tests/fuzz/test_backends.py --examples 100

With graph breaks they are trained for three steps by the back end itself, within budgets that can be met. A tenth as
many are compiled to kernels, which takes a compiler, and which write over what they are the last to read.
"""

import contextlib
import copy
import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memrewrite
from memrewrite.backends import entry
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.torch_internals.written_over import written_over
from memrewrite.workload.step import Inputs, default_loss
from tests.backends.conftest import partitions  # noqa: F401  (a fixture)
from tests.fuzz.check import PARTS, private
from tests.fuzz.strategies import OPS, OUTPUTS, RandomNet, Recipe, make, recipes
from tests.fuzz.test_fuzz import ANY_TIME, SAME
from tests.support.divided import Divided, gradients

NEAR = 1.05  # of a budget, what is said to be needed instead
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


class Broken(RandomNet):
    """Its graph breaks before each of the steps that ``breaks`` counts, and before its outputs at the last."""

    breaks: frozenset[int]

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for number, do in enumerate(self.recipe.steps):
            if number in self.breaks:
                torch._dynamo.graph_break()
            a, b = (values[-1 - place % len(values)] for place in (do.a, do.b))
            values.append(OPS[do.op](self, a, b, do.k))
        if len(self.recipe.steps) in self.breaks:
            torch._dynamo.graph_break()
        return OUTPUTS[self.recipe.output](self, self.head(values[-1]), values)


def three_steps(model: nn.Module, inputs: Inputs, compiled: Any) -> list[Tensor]:
    """Losses, gradients and buffers of three steps, with the same random numbers each time."""
    found: list[Tensor] = []
    for number in range(3):
        random.seed(number)
        torch.manual_seed(number)
        loss = compiled(*private(inputs).args)
        loss.backward()
        found += [loss.detach(), *gradients(model), *(buffer.clone() for buffer in model.buffers())]
        model.zero_grad()
    return found


def break_one(recipe: Recipe, breaks: frozenset[int], share: float) -> None:
    """The numbers of PyTorch's own partitioner, within any budget from the lowest peak to what its graphs take."""
    model, inputs = make(recipe)
    model.__class__, model.breaks = Broken, breaks  # type: ignore[assignment]
    try:
        expected, usual = within("100%", model, inputs)
    except (RuntimeError, ValueError):  # the original fails, or has no gradient
        return
    if usual.peak is None:
        return
    found, lowest = within("min", model, inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    budget = int(lowest.peak + share * (usual.peak - lowest.peak))
    try:
        found, report = within(budget, model, inputs)
    except BudgetInfeasibleError as error:
        if (error.lowest or 0) < NEAR * budget:  # what others keep is a guess where one of several graphs is planned
            return
        raise
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert report.peak <= budget


def within(budget: str | int, model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], Any]:
    """The numbers of a copy of the model compiled within a budget, and the report."""
    tried = Trained(copy.deepcopy(model))
    torch._dynamo.reset()
    compiled = torch.compile(tried, backend=entry.memrewrite, options={"budget": budget, "optimizer": "none"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return three_steps(tried, inputs, compiled), memrewrite.report_of(compiled)


def compile_one(recipe: Recipe) -> None:
    """The numbers of Inductor's kernels as they usually are."""
    model, inputs = make(recipe)
    found: list[list[Tensor]] = []
    for over in (contextlib.nullcontext(), written_over()):
        tried = Trained(copy.deepcopy(model))
        torch._dynamo.reset()
        uncached = torch._functorch.config.patch(enable_autograd_cache=False)
        lean = torch._inductor.config.patch(fx_graph_cache=False, allow_buffer_reuse=False)
        with warnings.catch_warnings(), uncached, lean, over:
            warnings.simplefilter("ignore")
            try:
                found.append(three_steps(tried, inputs, torch.compile(tried)))
            except (RuntimeError, ValueError):  # the original fails, or has no gradient
                if found:
                    raise
                return
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)


BREAKS = st.frozensets(st.integers(0, 9), min_size=1, max_size=3)
BROKEN = given(recipes(longest=9), BREAKS, st.floats(0, 1))


@pytest.mark.usefixtures("partitions")
@pytest.mark.parametrize("examples", [1, 10])
def test_the_same_random_breaks_every_time(examples: int) -> None:
    settings(SAME, max_examples=examples)(BROKEN(break_one))()


@pytest.mark.fuzz
@pytest.mark.usefixtures("partitions")
@pytest.mark.parametrize("part", range(PARTS))
def test_other_random_breaks_every_time(part: int, request: pytest.FixtureRequest) -> None:
    examples = -(-request.config.getoption("--examples") // PARTS)
    some = settings(ANY_TIME, max_examples=examples, print_blob=True)
    some(BROKEN(break_one))()


@pytest.mark.parametrize("examples", [3, 40])
def test_the_same_random_models_every_time(examples: int) -> None:
    settings(SAME, max_examples=examples)(given(recipes(longest=9), BUDGETS)(divide_one))()


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_other_random_models_every_time(part: int, request: pytest.FixtureRequest) -> None:
    examples = -(-request.config.getoption("--examples") // PARTS)
    settings(ANY_TIME, max_examples=examples, print_blob=True)(given(recipes(), BUDGETS)(divide_one))()


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_that_write_over_what_they_read(part: int, request: pytest.FixtureRequest) -> None:
    examples = -(-request.config.getoption("--examples") // (10 * PARTS))
    settings(ANY_TIME, max_examples=examples, print_blob=True)(given(recipes())(compile_one))()
