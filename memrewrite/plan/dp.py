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
    before it, ``ms`` its cost (infinite where a node may not run again). ``keep`` and ``work`` say the same of a single
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
    stop = n
    for a in range(n - 1, -1, -1):
        stop = stop if chain.movable[a] else a
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


def plan(chain: Chain, table: Intervals, bound: int, slots: int = 256) -> Plan | None:
    """The cheapest plan whose estimated peak stays within ``bound`` bytes, None when there is none."""
    n = len(chain)
    width = max(bound // (slots - 1), 1)
    cost = np.full((n + 1, slots), np.inf)
    held = np.zeros((n + 1, slots), dtype=np.int64)
    origin = np.full((n + 1, slots, 2), -1, dtype=np.int64)  # (start of the interval, slot there); start -2: kept
    cost[0, 0] = 0.0
    for b in range(1, n + 1):
        starts = np.flatnonzero(np.isfinite(table.ms[:b, b]))
        before = held[starts]
        total = np.vstack([before + table.held[starts, b][:, None], held[b - 1] + table.keep[b - 1]])
        ms = np.vstack([cost[starts] + table.ms[starts, b][:, None], cost[b - 1]])
        needed = np.vstack([before + table.peak[starts, b][:, None], total[-1] + table.work[b - 1]])
        fits = (np.maximum(needed, total) <= bound) & np.isfinite(ms)
        where = np.argwhere(fits)
        if not len(where):
            continue
        values, size = ms[fits], total[fits]
        slot = np.minimum(size // width, slots - 1)
        order = np.lexsort((size, values, slot))
        first = order[np.unique(slot[order], return_index=True)[1]]
        target = slot[first]
        cost[b, target], held[b, target] = values[first], size[first]
        origin[b, target, 0] = np.append(starts, -2)[where[first, 0]]
        origin[b, target, 1] = where[first, 1]
    if not np.isfinite(cost[n]).any():
        return None
    return _trace(origin, n, int(cost[n].argmin()), float(cost[n].min()))


def _trace(origin: NDArray[np.int64], b: int, slot: int, ms: float) -> Plan:
    found = []
    while b > 0:
        a, before = (int(v) for v in origin[b, slot])
        if a == -2:
            b, slot = b - 1, before
        else:
            found.append((a, b))
            b, slot = a, before
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
