"""The plan of least recomputation time under a bound on bytes, by dynamic programming.

A plan walks the chain from left to right: a node is either kept (what autograd saves of it stays) or lies in an
interval that is recomputed as a whole when backward reaches it. Each storage is charged once, where it is made, and is
free again in backward below the first node that saves it.
State: (position, bytes held so far). Labels carry their exact bytes, so nothing is lost to rounding, which per node
would overcount by 30 %; where there are many, ``guide`` tells which are worth following.

An interval whose backward has M bytes to work in may itself be walked that way, under the bound M: segments in a
segment. ``Nested`` solves that for intervals between a few cuts of the chain and a few M, once for all plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.demand import keeping_on_demand, pieces
from memrewrite.plan.guide import Guide, guide, lightest
from memrewrite.plan.levels import Costs, cheapest_under_each
from memrewrite.plan.segments import Bytes, Chain, Plan
from memrewrite.plan.tables import (
    NEVER,
    Decision,
    Intervals,
    Keeping,
    Nested,
    Recompute,
    Space,
    Way,
    intervals,
    keeping,
)

_INNER_SLOTS = 32
_PARTS = 1024  # of the bound, within which labels are compared before they are sorted
_FEWEST, _MOST = 32, 16_000  # labels: of a position at least, and of a whole chain where there is room for more


def nested(table: Intervals, costs: Sequence[Costs], cuts: Bytes, levels: Bytes) -> list[Nested]:
    """Plan the inside of all intervals between ``cuts`` under each of ``levels`` bytes, by each of ``costs``.

    These are what intervals cost in ms, in the place of what ``table`` has for that.
    """
    ms = np.full((len(costs), len(cuts), len(cuts), len(levels)), np.inf)
    need = np.zeros(ms.shape, dtype=np.int64)
    for i, a in enumerate(cuts[:-1]):
        alone = np.array([each[a, cuts] for each in costs])
        reached = np.flatnonzero(np.isfinite(alone).any(axis=0))
        if not len(reached):
            continue
        ends, outside = cuts[reached], table.live_ins(int(a))
        more, needed = cheapest_under_each(table, costs, int(a), int(ends[-1]), levels, _INNER_SLOTS, outside)
        for k in range(len(costs)):
            inside, there = more[ends - a, k], np.isfinite(alone[k, reached])[:, None]
            ms[k, i, reached] = np.where(inside > 0, alone[k, reached][:, None] + inside, np.inf)
            need[k, i, reached] = np.where(there, needed[ends - a, k], 0)
    return [Nested(cuts, levels, *each) for each in zip(ms, need, strict=True)]


def flat(chain: Chain) -> Space:
    """The plans for a chain without segments in segments."""
    table = intervals(chain)
    choices = [save_bytes for save_bytes in chain.save_bytes if (save_bytes >= 0).any()]
    if chain.on_demand:
        return Space(table, keeping=tuple(keeping_on_demand(table, chain, save_bytes) for save_bytes in choices))
    return Space(table, keeping=tuple(Keeping(save_bytes, keeping(table, chain, save_bytes)) for save_bytes in choices))


def with_nested(among: Space, cuts: Bytes, levels: Bytes) -> Space:
    """The plans of ``among``, and those with segments in segments between ``cuts``, for inner bounds of ``levels``."""
    costs = [among.table.ms, *(each.table.ms for each in among.keeping)]
    inner, *others = nested(among.table, costs, cuts, levels)
    kept = (replace(each, inner=other) for each, other in zip(among.keeping, others, strict=True))
    return Space(among.table, inner, tuple(kept))


def plan(among: Space | Intervals, bound: int) -> Plan | None:
    """The cheapest plan found whose estimated peak stays within ``bound`` bytes, None when there is none."""
    if isinstance(among, Intervals):
        among = Space(among)
    n = len(among.table)
    rest = guide(among, bound)
    if rest is None:
        return None
    slots = max(_FEWEST, _MOST // max(n, 1))
    found = _walk(among, 0, n, bound, slots, among.table.live_ins(0), rest).back(n, among.decisions)
    if found is None:
        return None
    ms, recomputed = found
    chosen: list[tuple[int, int]] = []
    kept: list[tuple[int, int]] = []
    for a, b, how in recomputed:
        chosen.append((a, b))
        if (choice := how.way.keeping) is not None:
            kept += [(p, p + 1) for p in range(a, b) if choice.save_bytes[p] >= 0]
            chosen += pieces(choice, a, b)
        if how.level is not None:
            inside = Space(replace(among.table, ms=how.way.table.ms))
            labels = _walk(inside, a, b, how.level, _INNER_SLOTS, among.table.live_ins(a))
            within = labels.back(b - a, inside.decisions)
            chosen += [(c + a, d + a) for c, d, _ in within[1]] if within is not None else []
    return Plan(tuple(chosen), ms, tuple(kept))


def _walk(
    among: Space, start: int, stop: int, bound: int, slots: int, outside: Bytes, rest: Guide | None = None
) -> "_Labels":
    """Label the positions of [start, stop), counting only what is made in it; ``rest`` knows the whole chain alone.

    ``outside`` are the bytes that each interval uses of what is made before ``start``.
    """
    table = among.table
    labels = _Labels(stop - start, slots, bound, rest)
    labels.add(_Moves.beginning())
    # counted in the tables are also storages made before `start`; these are not part of what is held here
    unsaved = table.unsaved[start]
    for b in range(start + 1, stop + 1):
        last, kept = labels.first[b - start], labels.first[b - start - 1]
        need = max(int(table.work[b - 1] + unsaved[b]), int(table.forward[b - 1]), 0)
        total = labels.held[kept:last] + table.keep[b - 1]
        origin = kept + np.flatnonzero(total + need <= bound)
        ways = [_Moves(total[origin - kept], labels.ms[origin], origin, np.zeros(len(origin), dtype=np.int64))]
        for way in among.ways:
            ways.append(_whole(labels, way, start, b, bound, outside))
            if way.inner is not None and b in way.inner.cuts:
                ways.append(_nested_moves(labels, way, way.inner, b, bound))
        labels.add(_Moves.among(ways))
        if labels.first[b - start + 1] == last and rest is None and _stuck(labels, table, start, b, bound, outside):
            break
    return labels


def _stuck(labels: "_Labels", table: Intervals, start: int, b: int, bound: int, outside: Bytes) -> bool:
    """Whether no interval leads from the labels there are to ``b`` or beyond."""
    last = labels.first[b - start]
    a = labels.position[:last] + start
    return bool((labels.held[:last] + table.least[a, b] - outside[a, -1] > bound).all())


def _whole(labels: "_Labels", way: Way, start: int, b: int, bound: int, outside: Bytes) -> "_Moves":
    """Intervals that end at ``b`` and begin at ``start`` or later, all kept as they run again, if there is room."""
    ms, needed, held = way.table.ending_at(b, start, outside)
    first, last = labels.first[np.isfinite(ms).argmax()], labels.first[b - start]
    most = np.maximum(needed, held).take(labels.position[first:last])
    most += labels.held[first:last]
    origin = first + np.flatnonzero(most <= bound)
    a, total, cost = (each.take(origin) for each in (labels.position, labels.held, labels.ms))
    total += held.take(a)
    cost += ms.take(a)
    return _Moves(total, cost, origin, np.full(len(a), way.number))


@dataclass(frozen=True)
class _Moves:
    """Ways to reach a position within a bound: bytes held then, cost, the label it starts from, the decision."""

    held: Bytes
    ms: NDArray[np.float64]
    origin: Bytes
    decision: Bytes

    @classmethod
    def beginning(cls) -> "_Moves":
        nothing = np.zeros(1, dtype=np.int64)
        return cls(nothing, np.zeros(1), nothing - 1, nothing)

    @classmethod
    def among(cls, ways: "list[_Moves]") -> "_Moves":
        """All of them."""
        return cls(*(np.concatenate([getattr(way, field.name) for way in ways]) for field in fields(cls)))


def _nested_moves(labels: "_Labels", way: Way, inner: Nested, b: int, bound: int) -> _Moves:
    """Intervals from earlier cuts to ``b``, each with the cheapest plan inside that there is room for."""
    table = way.table
    end = int(np.searchsorted(inner.cuts, b))
    here = [np.arange(labels.first[cut], labels.first[cut + 1]) for cut in inner.cuts[:end]]
    origin = np.concatenate([np.empty(0, np.int64), *here])
    start = np.repeat(np.arange(end), [len(each) for each in here])
    a, before = inner.cuts[start], labels.held[origin]
    around = before + table.base[a, b]
    ms = np.where(inner.need[start, end] <= (bound - around)[:, None], inner.ms[start, end], np.inf)
    level = ms.argmin(axis=1)
    needed, total, cost = around + inner.need[start, end, level], before + table.held[a, b], ms.min(axis=1)
    fits = (np.maximum(needed, total) <= bound) & np.isfinite(cost)
    origin = origin[fits]
    return _Moves(total[fits], labels.ms[origin] + cost[fits], origin, way.number + 1 + level[fits])


class _Labels:
    """What can be reached: at each position, bytes held against milliseconds, none as large and as dear as another.

    All of them stay where there are up to ``slots``; else as many as promise most by ``rest``, or without it, of those
    within one of ``slots`` parts of ``bound``, the lightest and the cheapest.
    """

    def __init__(self, n: int, slots: int, bound: int, rest: Guide | None) -> None:
        size = 2 * (n + 1) * slots
        self.first = np.zeros(n + 2, dtype=np.int64)  # where the labels of each position begin
        self.position = np.zeros(size, dtype=np.int64)
        self.held = np.zeros(size, dtype=np.int64)
        self.ms = np.zeros(size)
        self._origin = np.zeros(size, dtype=np.int64)
        self._decision = np.zeros(size, dtype=np.int64)  # what leads there, by its number
        self._slots, self._next, self._rest = slots, 0, rest
        self._parts = slots if rest is None else max(slots, _PARTS)
        self._width = max(bound // (self._parts - 1), 1)

    def add(self, moves: _Moves) -> None:
        """Add the labels of the next position, less those that another one makes needless."""
        slot = np.minimum(moves.held // self._width, self._parts - 1)
        cheapest = np.full(self._parts + 1, np.inf)
        np.minimum.at(cheapest, slot + 1, moves.ms)
        order = np.flatnonzero(moves.ms < np.minimum.accumulate(cheapest)[slot])
        order = order[np.lexsort((moves.ms[order], moves.held[order]))]
        ms = moves.ms[order]
        order = order[ms < np.minimum.accumulate(np.append(np.inf, ms))[:-1]]  # rising bytes, falling cost
        if self._rest is not None:
            order = order[self._rest.best(self._next, moves.held[order], moves.ms[order], self._slots)]
        elif len(order) > self._slots:
            changes = np.diff(slot[order], prepend=-1, append=self._parts) > 0
            order = order[changes[:-1] | changes[1:]]
        start = self.first[self._next]
        self.first[self._next + 1 :] = end = start + len(order)
        self.position[start:end], self.held[start:end] = self._next, moves.held[order]
        self.ms[start:end], self._origin[start:end] = moves.ms[order], moves.origin[order]
        self._decision[start:end] = moves.decision[order]
        self._next += 1

    def back(
        self, position: int, decisions: Sequence[Decision]
    ) -> tuple[float, list[tuple[int, int, Recompute]]] | None:
        """The cost of the cheapest label of a position and what is recomputed, [a, b) each; None if there is none."""
        label = int(self.first[position + 1]) - 1
        if label < self.first[position]:
            return None
        ms, found = float(self.ms[label]), list[tuple[int, int, Recompute]]()
        while (b := int(self.position[label])) > 0:
            decision, label = decisions[self._decision[label]], int(self._origin[label])
            if isinstance(decision, Recompute):
                found.append((int(self.position[label]), b, decision))
        return ms, found[::-1]


def possible(among: Space, bound: int) -> bool:
    """Whether there is a plan under ``bound`` bytes."""
    return bool(lightest(among, bound)[-1] < NEVER)


def lowest_bound(among: Space | Intervals, upper: int, parts: int = 200) -> int:
    """The lowest bound in bytes for which a plan exists, to one of so many ``parts`` of ``upper``, by bisection."""
    among = Space(among) if isinstance(among, Intervals) else among
    low, high = 0, upper
    while high - low > max(upper // parts, 1):
        middle = (low + high) // 2
        if possible(among, middle):
            high = middle
        else:
            low = middle
    return high
