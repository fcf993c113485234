"""The places where few bytes cross are those that scipy's search for peaks finds."""

import random

import pytest
from scipy.signal import find_peaks

from memrewrite.backends.divisions import _LIGHT, _light


@pytest.mark.parametrize("seed", range(20))
def test_light_places_are_valleys(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  (no secret)
    across = [chance.randrange(chance.choice((2, 5, 30))) for _ in range(60)]
    places = list(range(60))
    _, told = find_peaks([-size for size in across], prominence=0, plateau_size=1)
    pairs = zip(told["left_edges"], told["prominences"], strict=True)
    deep = [int(i) for i, rise in pairs if rise >= across[i]]
    least = sorted(across[i] for i in deep)[len(deep) // 4]
    assert _light(places, across) == tuple(i for i in deep if across[i] <= _LIGHT * least)
