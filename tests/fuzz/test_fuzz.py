"""Random models: whatever ``optimize`` makes of them trains alike, within the budget, as predicted.

pytest -m fuzz --examples 1000      # other models every time; with pytest-xdist, -n 8 for eight at a time
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.check import PARTS, Ask, check
from tests.fuzz.edits import Change, changes, check_edited
from tests.fuzz.strategies import LENGTHS, Recipe, asks, make, recipes

ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

SAME = settings(ANY_TIME, derandomize=True, database=None, phases=[Phase.generate])  # -m fuzz shrinks


def try_one(recipe: Recipe, ask: Ask) -> None:
    model, inputs = make(recipe)
    check(model, inputs, ask, model.in_half, model.varies, LENGTHS[recipe.layout])


@pytest.mark.parametrize("examples", [3, 30])
def test_the_same_random_models_every_time(examples: int) -> None:
    settings(SAME, max_examples=examples)(given(recipes(longest=9), asks())(try_one))()


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_other_random_models_every_time(part: int, request: pytest.FixtureRequest) -> None:
    examples = -(-request.config.getoption("--examples") // PARTS)
    some = settings(ANY_TIME, max_examples=examples, print_blob=True)
    some(given(recipes(), asks())(try_one))()


def edit_one(recipe: Recipe, edits: list[Change], copied: str) -> None:
    model, inputs = make(recipe)
    check_edited(model, inputs, edits, copied)


COPIED = st.sampled_from(["no", "before", "after"])


@pytest.mark.parametrize("examples", [3, 30])
def test_the_same_edits_every_time(examples: int) -> None:
    settings(SAME, max_examples=examples)(given(recipes(longest=9), changes(), COPIED)(edit_one))()


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_other_edits_every_time(part: int, request: pytest.FixtureRequest) -> None:
    examples = -(-request.config.getoption("--examples") // PARTS)
    some = settings(ANY_TIME, max_examples=examples, print_blob=True)
    some(given(recipes(), changes(), COPIED)(edit_one))()
