"""Sizes of results that follow from sizes that vary, told from what they were in several passes.

A layer with strides, or one that adds or drops tokens, gives as many as ``(times * size + plus) // over`` says:

    inputs (8, 32, 64) -> pooled (8, 16, 64); of 31 are made 16, of 30 and 29 15, of 17 are made 9: (size + 1) // 2
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

LARGEST = 4
"""Times and over are no larger. To be told from all others, they need sizes that have every remainder."""
_Size = TypeVar("_Size", int, torch.SymInt)


@dataclass(frozen=True)
class Rule:
    """How a size follows from another one."""

    times: int
    plus: int
    over: int

    def __call__(self, size: _Size) -> _Size:
        """The size that follows from this one."""
        many: _Size = (self.times * size + self.plus) // self.over
        return many


def rule(sizes: Sequence[int], results: Sequence[int]) -> Rule | None:
    """The only rule by which all these results follow from these sizes, in order; None where there are more or none.

    None, too, for so few that they do not have every remainder.
    """
    found: list[Rule] = []
    if len(sizes) <= LARGEST:
        return None
    for over in range(1, LARGEST + 1):
        for times in (each for each in range(1, LARGEST + 1) if math.gcd(each, over) == 1):
            least = max(over * result - times * size for size, result in zip(sizes, results, strict=True))
            most = min(over * (result + 1) - 1 - times * size for size, result in zip(sizes, results, strict=True))
            found += [Rule(times, plus, over) for plus in range(least, most + 1)]
    return found[0] if len(found) == 1 else None


def derived(results: Sequence[int], known: Mapping[tuple[int, ...], Sequence[torch.SymInt]]) -> list[torch.SymInt]:
    """The size that was these results, from each of those that were what ``known`` has them by; empty without a rule.

    Empty, too, where it follows from one as well as from another.
    """
    rules = {sizes: each for sizes in known if (each := rule(sizes, results)) is not None}
    if len(rules) != 1:
        return []
    ((sizes, each),) = rules.items()
    return [each(size) for size in known[sizes]]
