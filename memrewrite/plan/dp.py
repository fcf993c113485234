"""The interval plan of least recomputation time under a bound on bytes, by dynamic programming.

A plan walks the chain from left to right: a node is either kept (what autograd saves of it stays) or lies in an
interval that is recomputed as a whole when backward reaches it. Each storage is charged once, where it is made, and is
free again in backward below the first node that saves it.
State: (position, bytes held so far). Labels carry their exact bytes; slots only decide which labels compete, so
nothing is lost to rounding, which per node would overcount by 30 %.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes, Chain, Plan

_NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Intervals:
    """Tables over all intervals [a, b) of a chain, in bytes and ms.

    ``held`` is what an interval adds to what is held after it, ``peak`` what its backward needs besides what was held
    before it, ``ms`` its cost (infinite where it may not run again). ``keep`` and ``work`` say the same of a single
    node that is kept.
    """

    held: Bytes
    peak: Bytes
    ms: NDArray[np.float64]
    keep: Bytes
    work: Bytes


def intervals(chain: Chain) -> Intervals:
    """Tabulate all intervals of a chain; entry [a, b] of each table is the interval [a, b)."""
    n = len(chain)
    saved = [s for s in chain.storages if s.saver is not None]
    passing = [s for s in chain.storages if s.saver is None]
    out = _count(n, [(s.producer, s.last_use, s.bytes) for s in saved])
    entering = _count(n, [(s.producer, s.last_use, s.bytes) for s in passing])
    later = _count(n, [(s.producer, s.first_use, s.bytes) for s in saved])
    unsaved_yet = _count(n, [(s.producer, s.saver or 0, s.bytes) for s in saved])
    kept = _count(n, [(s.producer, s.saver or 0, s.bytes) for s in saved])
    held = np.zeros((n + 1, n + 1), dtype=np.int64)
    peak = np.full((n + 1, n + 1), _NEVER, dtype=np.int64)
    ms = np.full((n + 1, n + 1), np.inf)
    time = np.concatenate([[0.0], chain.ms.cumsum()])
    last_save = np.maximum.accumulate(np.where(chain.saves, np.arange(n), -1))
    for a in range(n - 1, -1, -1):
        stop = int(chain.reach[a])
        if stop == a:
            continue
        b = np.arange(a + 1, stop + 1)
        # live-ins that nobody saves are held for the interval; what is first used after it is free again by then
        live_in = entering[a, a] - entering[a, b] + 0 * b
        held[a, b] = out[b, b] - out[a, b] + live_in
        inside = kept[b, a] - kept[b, b] - (kept[a, a] - kept[a, b])
        peak[a, b] = np.maximum.accumulate(inside + chain.work[a:stop]) + live_in - later[a, b]
        j = last_save[b - 1]
        ms[a, b] = np.where(j >= a, time[j] - time[a] + chain.rerun_ms[j], 0.0) + chain.segment_ms
    position = np.arange(n)
    keep = out[position + 1, 0] - out[position, 0]
    work = chain.work - unsaved_yet[position + 1, position + 1]
    return Intervals(held, peak, ms, keep, work)


def _count(n: int, entries: list[tuple[int, int, int]]) -> Bytes:
    """For (made at p, used at u, bytes): table[x, y] is the bytes made before x and used at y or later."""
    table = np.zeros((n + 1, n + 2), dtype=np.int64)
    for producer, use, size in entries:
        table[producer + 1, min(use, n)] += size
    return table.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]


def plan(chain: Chain, table: Intervals, bound: int, slots: int = 512) -> Plan | None:
    """The cheapest plan whose estimated peak stays within ``bound`` bytes, None when there is none."""
    n = len(chain)
    labels = _Labels(n, slots, max(bound // (slots - 1), 1))
    labels.add(0, np.zeros(1, dtype=np.int64), np.zeros(1), np.full(1, -1))
    for b in range(1, n + 1):
        usable = np.flatnonzero(np.isfinite(table.ms[:b, b]))
        first = labels.first[usable[0] if len(usable) else b]
        last, kept = labels.first[b], labels.first[b - 1]
        start, held = labels.position[first:last], labels.held[first:last]
        total = np.append(held + table.held[start, b], labels.held[kept:last] + table.keep[b - 1])
        needed = np.append(held + table.peak[start, b], total[len(start) :] + table.work[b - 1])
        ms = np.append(labels.ms[first:last] + table.ms[start, b], labels.ms[kept:last])
        # An origin at or after `last` stands for the label that many before it, of which the node b - 1 is kept.
        origin = np.append(np.arange(first, last), np.arange(kept, last) + last)
        fits = (np.maximum(needed, total) <= bound) & np.isfinite(ms)
        labels.add(b, total[fits], ms[fits], origin[fits])
    return labels.cheapest()


class _Labels:
    """What can be reached: at each position, bytes held against milliseconds, none as large and as dear as another.

    Of those within one of ``slots`` parts of the bound, ``width`` bytes each, the cheapest stays.
    """

    def __init__(self, n: int, slots: int, width: int) -> None:
        size = (n + 1) * slots
        self.first = np.zeros(n + 2, dtype=np.int64)  # where the labels of each position begin
        self.position = np.zeros(size, dtype=np.int64)
        self.held = np.zeros(size, dtype=np.int64)
        self.ms = np.zeros(size)
        self._origin = np.zeros(size, dtype=np.int64)
        self._slots, self._width = slots, width

    def add(self, position: int, held: Bytes, ms: NDArray[np.float64], origin: Bytes) -> None:
        """Add the labels of the next position, less those that another one makes needless."""
        slot = np.minimum(held // self._width, self._slots - 1)
        cheapest = np.full(self._slots + 1, np.inf)
        np.minimum.at(cheapest, slot + 1, ms)
        below = np.minimum.accumulate(cheapest)[slot]
        order = np.flatnonzero((ms == cheapest[slot + 1]) & (ms < below))
        order = order[np.lexsort((held[order], slot[order]))]
        order = order[np.unique(slot[order], return_index=True)[1]]
        start = self.first[position]
        self.first[position + 1 :] = end = start + len(order)
        self.position[start:end], self.held[start:end] = position, held[order]
        self.ms[start:end], self._origin[start:end] = ms[order], origin[order]

    def cheapest(self) -> Plan | None:
        """The plan that leads to the cheapest label of the last position, None if that has none."""
        start, end = self.first[-2], self.first[-1]
        if start == end:
            return None
        found = []
        label = end - 1  # they are in order of bytes, so of falling cost
        ms = float(self.ms[label])
        while (b := int(self.position[label])) > 0:
            kept = self._origin[label] >= self.first[b]
            label = self._origin[label] - self.first[b] if kept else self._origin[label]
            if not kept:
                found.append((int(self.position[label]), b))
        return Plan(tuple(reversed(found)), ms)


def lowest_bound(chain: Chain, table: Intervals, upper: int) -> int:
    """The lowest bound in bytes for which a plan exists, within 0.5 % of ``upper``, by bisection."""
    low, high = 0, upper
    while high - low > max(upper // 200, 1):
        middle = (low + high) // 2
        if plan(chain, table, middle, slots=64) is None:
            low = middle
        else:
            high = middle
    return high
