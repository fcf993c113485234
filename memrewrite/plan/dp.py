"""The interval plan of least recomputation time under a bound on bytes, by dynamic programming.

A plan walks the chain from left to right: a node is either kept (what autograd saves of it stays) or lies in an
interval that is recomputed as a whole when backward reaches it. Each storage is charged once, where it is made.
State: (position, bytes held so far). Labels carry their exact bytes; slots only decide which labels compete, so
nothing is lost to rounding, which per node would overcount by 30 %.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes, Chain, Plan

SLOTS = 256
_INFINITE = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Intervals:
    """For every interval [a, b): bytes of its live-outs, bytes it needs while backward runs it, and its cost in ms."""

    held: Bytes
    peak: Bytes
    ms: NDArray[np.float64]
    keep: Bytes


def intervals(chain: Chain) -> Intervals:
    """Tabulate all intervals of a chain; entry [a, b] of each table is the interval [a, b)."""
    n = len(chain)
    held = np.zeros((n + 1, n + 1), dtype=np.int64)
    peak = np.full((n + 1, n + 1), _INFINITE, dtype=np.int64)
    ms = np.full((n + 1, n + 1), np.inf)
    keep = np.zeros(n, dtype=np.int64)
    made = np.zeros(n, dtype=np.int64)
    outs = np.zeros((n, n + 2), dtype=np.int64)  # outs[p, u]: bytes made at p whose last use is u
    for s in chain.storages:
        outs[s.producer, min(s.last_use, n) + 1] += s.bytes
        if s.saved:
            keep[s.producer] += s.bytes
            made[s.producer] += s.bytes
    alive = outs[:, ::-1].cumsum(axis=1)[:, ::-1]  # alive[p, b]: bytes made at p that are read at b or later
    live = np.vstack([np.zeros((1, n + 2), dtype=np.int64), alive.cumsum(axis=0)])
    saved = np.concatenate([[0], made.cumsum()])
    time = np.concatenate([[0.0], chain.ms.cumsum()])
    last_save = np.maximum.accumulate(np.where(chain.saves, np.arange(n), -1))
    for a in range(n):
        end = next((i for i in range(a, n) if not chain.movable[i]), n)
        b = np.arange(a + 1, end + 1)
        if not len(b):
            continue
        held[a, b] = live[b, b + 1] - live[a, b + 1]
        inner = np.maximum.accumulate(saved[b] - saved[a] + chain.work[a:end])
        peak[a, b] = inner
        j = last_save[b - 1]
        ms[a, b] = np.where(j >= a, time[j] - time[a] + chain.rerun_ms[j], 0.0) + chain.segment_ms
    return Intervals(held, peak, ms, keep)


def plan(chain: Chain, table: Intervals, bound: int) -> Plan | None:
    """The cheapest plan whose estimated peak stays within ``bound`` bytes, None when there is none."""
    n = len(chain)
    slot = max(bound // (SLOTS - 1), 1)
    cost = np.full((n + 1, SLOTS), np.inf)
    held = np.zeros((n + 1, SLOTS), dtype=np.int64)
    origin = np.full((n + 1, SLOTS, 2), -1, dtype=np.int64)
    cost[0, 0] = 0.0
    for b in range(1, n + 1):
        starts = np.flatnonzero(np.isfinite(table.ms[:b, b]))
        total = held[starts] + table.held[starts, b][:, None]
        ms = cost[starts] + table.ms[starts, b][:, None]
        fits = total + table.peak[starts, b][:, None] <= bound
        kept = held[b - 1] + table.keep[b - 1]
        total = np.vstack([total, kept])
        ms = np.vstack([ms, cost[b - 1]])
        fits = np.vstack([fits, kept + chain.work[b - 1] <= bound]) & np.isfinite(ms)
        starts = np.append(starts, b - 1)
        where = np.argwhere(fits)
        if not len(where):
            continue
        values, bytes_held = ms[fits], total[fits]
        slots = np.minimum(bytes_held // slot, SLOTS - 1)
        best = np.lexsort((bytes_held, values, slots))
        first = best[np.unique(slots[best], return_index=True)[1]]
        target = slots[first]
        cost[b, target], held[b, target] = values[first], bytes_held[first]
        origin[b, target, 0] = starts[where[first, 0]]
        origin[b, target, 1] = where[first, 1]
        kept_row = where[first, 0] == len(starts) - 1
        origin[b, target, 0] = np.where(kept_row, -2, origin[b, target, 0])
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
        if plan(chain, table, middle) is None:
            low = middle
        else:
            high = middle
    return high
