"""The cheapest plans of the beginnings of a stretch of a chain, by several costs and under several bounds at once.

It is the walk of ``dp``, taken for all of them step by step: what a step looks up in the tables is the same, and most
steps of one bound have so few labels that looking them up takes the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes
from memrewrite.plan.tables import NEVER, Intervals

Costs = NDArray[np.float64]
_PARTS = (128, 1024)  # of the highest bound, where few moves, or many, are compared before they are sorted
_MANY = 4096


def cheapest_under_each(
    table: Intervals, costs: Sequence[Costs], start: int, stop: int, levels: Bytes, slots: int, outside: Bytes
) -> tuple[Costs, Bytes]:
    """For [start, start + i) by ``costs[k]`` under ``levels[j]`` bytes, at [i, k, j]: the least cost, and its need.

    That cost is infinite where there is no plan. ``costs`` stand in the place of the ``ms`` of ``table``. ``outside``
    are the bytes that each interval uses of what is made before ``start``. Of the labels that share one of ``slots``
    parts of a bound, the lightest and the cheapest are followed where there are more than ``slots``.
    """
    labels = _Labels(stop - start, slots, levels, len(costs))
    lanes = np.arange(len(costs) * len(levels))
    nothing = np.zeros(len(lanes), dtype=np.int64)
    labels.add(_Moves(nothing, np.zeros(len(lanes)), nothing - 1, lanes), nothing)
    unsaved = table.unsaved[start]
    for b in range(start + 1, stop + 1):
        need = max(int(table.work[b - 1] + unsaved[b]), int(table.forward[b - 1]), 0)
        kept = _kept(labels, b - start, int(table.keep[b - 1]), need)
        whole, needed = _whole(labels, table, costs, start, b, outside)
        moves = kept.and_then(whole)
        order = labels.best(moves)
        chosen = moves.taking(order)
        by_interval = labels.held[chosen.origin] + needed[labels.position[chosen.origin]]
        labels.add(chosen, np.where(order < len(kept), chosen.held + need, by_interval))
        if not len(order) and _stuck(labels, table, start, b, outside):
            break
    return labels.least()


@dataclass(frozen=True)
class _Moves:
    """Ways to reach a position: bytes held then, cost, the label each starts from, its lane.

    A lane is a bound under which plans are made by one of the costs: those of the first come first, bound by bound.
    There are many moves, of which few lead on: what else is to be known is looked up for those.
    """

    held: Bytes
    ms: Costs
    origin: Bytes
    lane: Bytes

    def __len__(self) -> int:
        return len(self.ms)

    def and_then(self, other: "_Moves") -> "_Moves":
        """These, then those."""
        return _Moves(*(np.concatenate([mine, theirs]) for mine, theirs in zip(self._each, other._each, strict=True)))

    def taking(self, which: NDArray[Any]) -> "_Moves":
        """Some of them, by a mask or by number."""
        return _Moves(*(each[which] for each in self._each))

    @property
    def _each(self) -> tuple[NDArray[Any], ...]:
        return self.held, self.ms, self.origin, self.lane


def _kept(labels: "_Labels", position: int, more: int, need: int) -> _Moves:
    """The node before ``position``, kept, from each label before it."""
    before = slice(labels.first[position - 1], labels.first[position])
    origin = np.flatnonzero(labels.room[before] >= more + need) + before.start
    return _Moves(labels.held[origin] + more, labels.ms[origin], origin, labels.lane[origin])


def _whole(
    labels: "_Labels", table: Intervals, costs: Sequence[Costs], start: int, b: int, outside: Bytes
) -> tuple[_Moves, Bytes]:
    """Intervals that end at ``b`` and begin at ``start`` or later, all kept as they run again.

    Besides, the bytes that they need beyond those held before, by where they begin.
    """
    needed, held = table.taking_to(b, start, outside)
    ms, most = labels.steps_ms[:, : b - start], labels.steps_most[:, : b - start]
    for k, each in enumerate(costs):
        ms[k] = each[start:b, b]
        most[k] = np.where(np.isfinite(ms[k]), np.maximum(needed, held), NEVER)
    first, last = labels.first[(most.min(axis=0) <= labels.roomiest[: b - start]).argmax()], labels.first[b - start]
    fits = labels.steps_most.take(labels.place[first:last]) <= labels.room[first:last]
    origin = first + np.flatnonzero(fits)
    a, ms_to = labels.position[origin], labels.steps_ms.take(labels.place[origin])
    return _Moves(labels.held[origin] + held[a], labels.ms[origin] + ms_to, origin, labels.lane[origin]), needed


def _stuck(labels: "_Labels", table: Intervals, start: int, b: int, outside: Bytes) -> bool:
    """Whether no interval leads from the labels there are to ``b`` or beyond."""
    last = labels.first[b - start]
    a = labels.position[:last] + start
    return bool((table.least[a, b] - outside[a, -1] > labels.room[:last]).all())


class _Labels:
    """What can be reached in each lane, as in ``dp``: by position, then by lane, then by bytes held."""

    def __init__(self, n: int, slots: int, levels: Bytes, costs: int) -> None:
        self._shape = costs, len(levels)
        self.by_cost = np.repeat(np.arange(costs), len(levels))  # the number of the cost, by lane
        levels = np.tile(levels, costs)
        lanes = len(levels)
        size = 2 * (n + 1) * slots * lanes
        self.first = np.zeros(n + 2, dtype=np.int64)  # where the labels of each position begin
        self.position, self.lane, self.held, self.room, self._needed = np.zeros((5, size), dtype=np.int64)
        # By cost and position, what the intervals to the next one take; and where a label's stands in these.
        self.steps_ms, self.steps_most = np.zeros((costs, n + 1)), np.zeros((costs, n + 1), dtype=np.int64)
        self.place = np.zeros(size, dtype=np.int64)
        self.ms = np.zeros(size)
        self.roomiest = np.full(n + 1, -1, dtype=np.int64)  # the most room of a label, by position
        self._slots, self._levels, self._next = slots, levels, 0
        self._width = np.maximum(levels // (slots - 1), 1)
        self._highest = int(levels.max())
        self._rows = np.arange(lanes)

    def best(self, moves: _Moves) -> Bytes:
        """The numbers of the moves that no other one makes needless, by lane, then by bytes held; few of each slot."""
        order = self._sifted(moves)
        order = order[np.lexsort((moves.ms[order], moves.held[order], moves.lane[order]))]
        order = order[self._falling(moves.lane[order], moves.ms[order])]
        return self._far(order, moves.lane[order], moves.held[order])

    def add(self, chosen: _Moves, needed: Bytes) -> None:
        """Add the labels of the next position; what leads there takes as many bytes of the bound."""
        start = self.first[self._next]
        self.first[self._next + 1 :] = end = start + len(chosen)
        self.position[start:end], self.lane[start:end] = self._next, chosen.lane
        self.place[start:end] = self.by_cost[chosen.lane] * len(self.roomiest) + self._next
        self.held[start:end], self.ms[start:end] = chosen.held, chosen.ms
        self.room[start:end] = self._levels[chosen.lane] - chosen.held
        self.roomiest[self._next] = self.room[start:end].max(initial=-1)
        self._needed[start:end] = np.maximum(self._needed[chosen.origin], needed)
        self._next += 1

    def _sifted(self, moves: _Moves) -> Bytes:
        """The numbers of the moves that may be among the best: of most that is seen without sorting them.

        None that costs as much as one that holds parts less.
        """
        parts = _PARTS[len(moves) > _MANY]
        part = moves.lane * parts + moves.held // (self._highest // parts + 1)
        cheapest, below = np.full((2, len(self._levels), parts), np.inf)
        np.minimum.at(cheapest.ravel(), part, moves.ms)  # of a part, then of those below it
        np.minimum.accumulate(cheapest[:, :-1], axis=1, out=below[:, 1:])
        return np.flatnonzero(moves.ms < below.ravel()[part])

    def _falling(self, lane: Bytes, ms: Costs) -> NDArray[np.bool_]:
        """Which cost less than all before them in the same lane."""
        begins = np.searchsorted(lane, self._rows)
        place = np.arange(len(lane)) - begins[lane]
        table = np.full((len(self._levels), int(place.max(initial=0)) + 2), np.inf)
        table[lane, place + 1] = ms
        found: NDArray[np.bool_] = ms < np.minimum.accumulate(table, axis=1)[lane, place]
        return found

    def _far(self, order: Bytes, lane: Bytes, held: Bytes) -> Bytes:
        """Which are followed: the first and the last of a slot where a lane has more than there are slots."""
        few = np.bincount(lane, minlength=len(self._levels)) <= self._slots
        if few.all():
            return order
        slot = lane * self._slots + np.minimum(held // self._width[lane], self._slots - 1)
        changes, followed = slot[1:] != slot[:-1], few[lane]
        followed[1:] |= changes
        followed[:-1] |= changes
        followed[[0, -1]] = True
        return order[followed]

    def least(self) -> tuple[Costs, Bytes]:
        """At each position, by cost and bound, the cheapest label's, infinite where there is none, and its need."""
        shape = len(self.first) - 1, len(self._levels)
        ms, needed = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
        # They are in order of bytes, so of falling cost: of several the last one stays.
        end = self.first[-1]
        place = self.position[:end], self.lane[:end]
        ms[place], needed[place] = self.ms[:end], self._needed[:end]
        return ms.reshape(-1, *self._shape), needed.reshape(-1, *self._shape)
