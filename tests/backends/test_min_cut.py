"""What is kept is of all that would do the fewest bytes, and of those what leaves least to be made."""

import itertools
import random

import pytest

from memrewrite.backends.min_cut import INFINITE, Shape, cheapest_cut


def enough(
    kept: set[int], needed: list[int], inputs: list[tuple[int, ...]], prices: list[int], made: list[bool]
) -> int:
    """How many values have to be made where these are kept; -1 where that does not do."""
    ahead, there = [*needed], set(kept)
    while ahead:
        value = ahead.pop()
        if value in there or not prices[value]:
            continue
        if not made[value]:
            return -1
        there.add(value)
        ahead += inputs[value]
    return len(there - kept)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_cheaper(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  (no secret)
    count = chance.randrange(3, 11)
    inputs = [tuple({chance.randrange(max(0, i - 4), i) for _ in range(2)}) if i else () for i in range(count)]
    made = [bool(inputs[i]) and chance.random() < 0.7 for i in range(count)]
    prices = [chance.choice((1, 2, 3, 5)) if i and chance.random() < 0.9 else 0 for i in range(count)]
    prices = [INFINITE if made[i] and price and chance.random() < 0.2 else price for i, price in enumerate(prices)]
    needed = chance.sample(range(count), 2)
    known: dict[Shape, tuple[int, ...]] = {}
    found = cheapest_cut(needed, inputs, prices, made.__getitem__, known)
    priced = [i for i in range(count) if prices[i]]
    choices = (set(each) for size in range(count + 1) for each in itertools.combinations(priced, size))
    doing = [
        (sum(prices[i] for i in each), again)
        for each in choices
        if (again := enough(each, needed, inputs, prices, made)) >= 0
    ]
    assert (sum(prices[i] for i in found), enough(found, needed, inputs, prices, made)) == min(doing)
    later = [*inputs, *(tuple(count + i for i in each) for each in inputs)]
    moved = cheapest_cut([count + i for i in needed], later, 2 * prices, (2 * made).__getitem__, known)
    assert moved == {count + i for i in found}
    assert len(known) == 1  # an equal layer further on has the same shape
