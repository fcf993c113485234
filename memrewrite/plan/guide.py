"""What a plan will still cost from a position on, by the bytes it holds there: this tells the planner which to follow.

What can be held is known exactly: no plan holds less at a position than ``lightest`` says, and one that holds no more
than ``heaviest`` says can go on to the end. Between these two the cost to go is estimated at a few points, from the end
backwards, and is taken to be straight between them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes
from memrewrite.plan.tables import NEVER, Space

_POINTS = 128
_ROUNDING = 0.5  # bytes


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
        below = found.astype(np.int64)
        np.minimum(below, _POINTS - 1, out=below)
        found -= below
        found *= np.diff(values).take(below)
        found += values.take(below)
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
        if not len(a):
            continue
        at = points[a]
        cost = found.ms(int(b), at + held[:, None])
        cost += ms[:, None]
        cost[~(at <= np.minimum(bound - needed, heavy[b] - held)[:, None] + _ROUNDING)] = np.inf
        first = np.flatnonzero(np.diff(a, prepend=-1))  # of the arcs from each position
        least = np.fmin.reduceat(cost, first)
        found.rest[a[first]] = np.fmin(found.rest[a[first]], least)
    return found


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
