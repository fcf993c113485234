"""Sizes that follow from sizes that vary are told from what they were, and from nothing less."""

from collections.abc import Callable
from functools import partial

import pytest

from memrewrite.capture.derived import LARGEST, Rule, rule
from memrewrite.capture.other_sizes import a_bit_less, a_quarter, apart, far_apart

PASSES: list[Callable[[int, int], int]] = [
    lambda size, dim: size,
    apart,
    far_apart,
    a_quarter,
    *(partial(a_bit_less, number) for number in range(1, LARGEST)),
]


def sizes(size: int, dim: int = 1) -> list[int]:
    """What a size is in each pass."""
    return [each(size, dim) for each in PASSES]


@pytest.mark.parametrize("longest", [24, 32, 224, 1000])
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda size: size + 1, Rule(1, 1, 1)),
        (lambda size: 2 * size - 1, Rule(2, -1, 1)),
        (lambda size: (size + 2 * 3 - 7) // 2 + 1, Rule(1, 1, 2)),  # a convolution of 7 with strides of 2
        (lambda size: size // 4, Rule(1, 0, 4)),
        (lambda size: 3 * size // 4, Rule(3, 0, 4)),
        (lambda size: -(-size // 16) * 16, None),
        (lambda size: min(size, 20), None),
        (lambda size: size // 5, None),
    ],
)
def test_a_rule_is_told_from_passes(longest: int, function: Callable[[int], int], found: Rule | None) -> None:
    seen = sizes(longest)
    assert rule(seen, [*map(function, seen)]) == found
    if found is not None:
        assert all(found(size) == function(size) for size in range(2, longest))


def test_two_passes_tell_no_rule() -> None:
    assert rule([32, 17], [16, 8]) is None


@pytest.mark.parametrize("size", [32, 64, 224])
@pytest.mark.parametrize("over", [2, 3, 4])
def test_what_follows_from_the_height_of_square_images_does_not_from_their_width(size: int, over: int) -> None:
    height, width = sizes(size, 2), sizes(size, 3)
    results = [each // over for each in height]
    assert rule(height, results) == Rule(1, 0, over)
    assert rule(width, results) is None
