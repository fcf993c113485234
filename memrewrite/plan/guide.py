"""What a plan will still cost from a position on, by the bytes it holds there: this tells the planner which to follow.

What can be held is known exactly: no plan holds less at a position than ``lightest`` says, and one that holds no more
than ``heaviest`` says can go on to the end. Between these two the cost to go is estimated at a few points, from the end
backwards, and is taken to be straight between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes
from memrewrite.plan.tables import NEVER, Space

_POINTS = 128
_ROUNDING = 0.5  # bytes
_AT_ONCE = 128  # arcs: the costs at their points fill 130 kB


@dataclass(frozen=True)
class Guide:
    """``rest[p, j]`` is about the least cost in ms from position p on at the j-th of the points between its limits."""

    lightest: Bytes
    heaviest: Bytes
    rest: NDArray[np.float64]

    def ms(self, position: int, held: NDArray[Any]) -> NDArray[np.float64]:
        """About the least cost from ``position`` on of plans that hold ``held`` bytes there, at most the heaviest."""
        lightest, values = self.lightest[position], self.rest[position]
        width = max((self.heaviest[position] - lightest) / _POINTS, _ROUNDING)
        found: NDArray[np.float64] = np.subtract(held, lightest, dtype=np.float64)
        found /= width  # the place among the points, of which the one below is:
        part = np.minimum(np.trunc(found), float(_POINTS - 1))
        below = part.astype(np.int64)
        found -= part
        found *= np.diff(values).take(below, out=part, mode="clip")
        found += values.take(below, out=part, mode="clip")
        return found

    def best(self, position: int, held: Bytes, ms: NDArray[np.float64], most: int) -> Bytes:
        """The numbers of the ``most`` labels, given in order of bytes, that promise the cheapest plans."""
        last = int(np.searchsorted(held, self.heaviest[position], side="right"))
        if last <= most:
            return np.arange(last)
        total = ms[:last] + self.ms(position, held[:last])
        return np.sort(total.argpartition(most)[:most])


def guide(among: Space, bound: int) -> Guide | None:
    """The guide for plans under ``bound`` bytes; None where there is no plan."""
    light, heavy = lightest(among, bound), heaviest(among, bound)
    if light[-1] == NEVER:
        return None
    found = Guide(light, heavy, np.full((len(light), _POINTS + 1), np.inf))
    found.rest[-1] = 0.0
    points = light[:, None] + (heavy - light)[:, None] / _POINTS * np.arange(_POINTS + 1)
    for b in np.flatnonzero(light <= heavy)[:0:-1]:
        arcs = among.leading(int(b))
        before = light[arcs.a]
        fits = (before + arcs.needed <= bound) & (before + arcs.held <= heavy[b]) & (before <= heavy[arcs.a])
        a, held, needed, ms = (each[fits] for each in (arcs.a, arcs.held, arcs.needed, arcs.ms))
        most = np.minimum(bound - needed, heavy[b] - held) + _ROUNDING
        for some in _apart(a):
            at, least = points.take(a[some], axis=0), found.rest.take(a[some], axis=0)
            cost = found.ms(int(b), at + held[some, None])
            cost += ms[some, None]
            np.fmin(least, cost, out=least, where=at <= most[some, None])
            found.rest[a[some]] = least
    return found


def _apart(a: Bytes) -> Iterator[Bytes]:
    """The numbers of arcs, so many at a time as caches hold, of which no two begin at one position; ``a`` ascends."""
    number = np.arange(len(a))
    among_equals = number - np.searchsorted(a, a)
    for turn in range(among_equals.max(initial=-1) + 1):
        one_each = np.flatnonzero(among_equals == turn)
        yield from (one_each[start : start + _AT_ONCE] for start in range(0, len(one_each), _AT_ONCE))


def lightest(among: Space, bound: int) -> Bytes:
    """The fewest bytes held at each position by any plan that gets there under ``bound``, else ``NEVER``."""
    found = np.full(len(among.table) + 1, NEVER, dtype=np.int64)
    found[0] = 0
    for b in range(1, len(found)):
        arcs = among.leading(b)
        before = found[arcs.a]
        lowest = (before + arcs.held)[before + arcs.needed <= bound].min(initial=NEVER)
        found[b] = lowest if lowest <= bound else NEVER
    return found


def heaviest(among: Space, bound: int) -> Bytes:
    """The most bytes that may be held at each position for a plan to lead on to the end under ``bound``."""
    found = np.full(len(among.table) + 1, -NEVER, dtype=np.int64)
    found[-1] = bound
    for b in range(len(found) - 1, 0, -1):
        arcs = among.leading(b)
        np.maximum.at(found, arcs.a, np.minimum(found[b] - arcs.held, bound - arcs.needed))
    return found
