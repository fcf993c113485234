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
from memrewrite.plan.tables import NEVER, Arcs, Space

_POINTS = 128
_ROUNDING = 0.5  # bytes
_BLOCKS = 8  # of points
_ALIKE = 1 + 1e-9  # times a cost: what rounding may make of it


@dataclass(frozen=True)
class Guide:
    """``rest[p, j]`` is about the least cost in ms from position p on at the j-th of the points between its limits."""

    lightest: Bytes
    heaviest: Bytes
    rest: NDArray[np.float64]

    def ms(self, position: int | Bytes, held: NDArray[Any]) -> NDArray[np.float64]:
        """About the least cost from a ``position`` on of plans that hold ``held`` bytes there, at most the heaviest."""
        lightest = self.lightest[position]
        width = np.maximum((self.heaviest[position] - lightest) / _POINTS, _ROUNDING)
        found: NDArray[np.float64] = np.subtract(held, lightest, dtype=np.float64)
        found /= width  # the place among the points, of which the one below is:
        part = np.minimum(np.trunc(found), float(_POINTS - 1))
        below = part.astype(np.int64)
        below += position * (_POINTS + 1)
        found -= part
        values = self.rest.take(below, out=part, mode="clip")
        below += 1
        found *= self.rest.take(below, mode="clip") - values
        found += values
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
    for a in np.flatnonzero(light <= heavy)[-2::-1]:
        found.rest[a] = _least(found, among.leaving(int(a)), int(a), bound)
    return found


def _least(found: Guide, arcs: Arcs, a: int, bound: int) -> NDArray[np.float64]:
    """The least costs from position ``a`` on by any of the ``arcs`` from there, where the costs from their ends are.

    Costs never fall as more is held: an arc that takes more at the first point of a block than another one at the first
    point of the next block is of no use between.
    """
    light, heavy = found.lightest[a], found.heaviest[a]
    points = light + (heavy - light) / _POINTS * np.arange(_POINTS + 1)
    most = np.minimum(bound - arcs.needed, found.heaviest[arcs.other] - arcs.held)
    fits = most >= light
    b, held, most, ms = arcs.other[fits, None], arcs.held[fits, None], most[fits, None], arcs.ms[fits, None]

    def costs(which: Bytes | slice, at: NDArray[np.float64]) -> NDArray[np.float64]:
        cost = found.ms(b[which], at + held[which])
        cost += ms[which]
        cost[at > most[which] + _ROUNDING] = np.inf
        return cost

    least = np.empty(_POINTS + 1)
    blocks, within = (each[:-1].reshape(_BLOCKS, -1) for each in (least, points))
    firsts = costs(slice(None), points[:: _POINTS // _BLOCKS])
    least[:: _POINTS // _BLOCKS] = best = firsts.min(axis=0)
    block, arc = np.nonzero((firsts[:, :-1] <= _ALIKE * best[1:]).T)
    begins = np.searchsorted(block, np.arange(_BLOCKS))
    blocks[:, 1:] = np.minimum.reduceat(costs(arc, within[block, 1:]), begins)
    return least


def lightest(among: Space, bound: int) -> Bytes:
    """The fewest bytes held at each position by any plan that gets there under ``bound``, else ``NEVER``."""
    found = np.full(len(among.table) + 1, NEVER, dtype=np.int64)
    found[0] = 0
    for b in range(1, len(found)):
        arcs = among.leading(b)
        before = found[arcs.other]
        lowest = (before + arcs.held)[before + arcs.needed <= bound].min(initial=NEVER)
        found[b] = lowest if lowest <= bound else NEVER
    return found


def heaviest(among: Space, bound: int) -> Bytes:
    """The most bytes that may be held at each position for a plan to lead on to the end under ``bound``."""
    found = np.full(len(among.table) + 1, -NEVER, dtype=np.int64)
    found[-1] = bound
    for b in range(len(found) - 1, 0, -1):
        arcs = among.leading(b)
        np.maximum.at(found, arcs.other, np.minimum(found[b] - arcs.held, bound - arcs.needed))
    return found
