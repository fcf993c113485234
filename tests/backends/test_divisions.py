"""The places where few bytes cross are those that scipy's search for peaks finds."""

import random

import pytest

from memrewrite.backends.divisions import _valleys


@pytest.mark.parametrize("seed", range(20))
def test_valleys_are_those_of_scipy(seed: int) -> None:
    from scipy.signal import find_peaks  # a second, which processes that run other files are spared

    chance = random.Random(seed)  # noqa: S311  (no secret)
    across = [chance.randrange(chance.choice((2, 5, 30))) for _ in range(60)]
    places = list(range(60))
    _, told = find_peaks([-size for size in across], prominence=0, plateau_size=1)
    pairs = zip(told["left_edges"], told["prominences"], strict=True)
    assert _valleys(places, across) == tuple(int(i) for i, rise in pairs if rise >= across[i])
