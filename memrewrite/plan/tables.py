"""What every interval of a chain would cost: bytes and milliseconds, tabulated once for all plans."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes, Chain, Held

NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Intervals:
    """Tables over all intervals [a, b) of a chain, in bytes and ms.

    ``held`` is what an interval adds to what is held after it, ``base`` what is held besides while backward is in it,
    ``peak`` what its backward needs in all beyond what was held before it, ``ms`` its cost (infinite where it may not
    run again). ``keep``, ``work`` and ``forward`` say the same of a single node that is kept: what it adds, and what
    its backward and its forward need beyond what is held after it.
    ``later`` and ``unsaved`` at [x, y] are the bytes saved of what is made before x that are first used at y or later,
    and that are first saved at y or later; ``least`` is the least ``peak`` of the intervals [x, y) and longer.
    ``passing`` are the storages that nobody saves.
    """

    held: Bytes
    base: Bytes
    peak: Bytes
    ms: NDArray[np.float64]
    keep: Bytes
    work: Bytes
    forward: Bytes
    later: Bytes
    unsaved: Bytes
    least: Bytes
    passing: tuple[Held, ...]

    def __len__(self) -> int:
        return len(self.keep)

    def live_ins(self, start: int) -> Bytes:
        """Of what is made before ``start`` and saved by nobody, the bytes that each interval [a, b) from it on uses."""
        return _live_ins(len(self), [s for s in self.passing if s.producer < start], start)

    def ending_at(self, b: int, start: int, outside: Bytes) -> tuple[NDArray[np.float64], Bytes, Bytes]:
        """Cost, bytes needed and bytes held of the intervals from ``start`` or later to ``b``, by where they start.

        Of what is made before ``start`` they use ``outside`` bytes, as ``live_ins`` has them, which do not count.
        """
        ms = self.ms[start:b, b]
        needed, held = self.taking_to(b, start, outside)
        return ms, np.where(np.isfinite(ms), needed, NEVER), held

    def taking_to(self, b: int, start: int, outside: Bytes) -> tuple[Bytes, Bytes]:
        """Bytes needed and bytes held of the same intervals, if they may run again."""
        live_in = outside[start:b, b]
        return self.peak[start:b, b] - live_in + self.later[start, b], self.held[start:b, b] - live_in


@dataclass(frozen=True)
class Nested:
    """Intervals between ``cuts`` (ascending positions) with segments in them.

    ``ms[i, j, l]`` is the cost of [cuts[i], cuts[j]) when what runs again there is planned under the bound
    ``levels[l]`` (ascending bytes); infinite where there is no such plan, or one without segments, which is the same
    as the interval alone. ``need`` is what such a plan takes of its bound.
    """

    cuts: Bytes
    levels: Bytes
    ms: NDArray[np.float64]
    need: Bytes


@dataclass(frozen=True)
class Arcs:
    """Steps of plans to one position, or from it, by the ``other``: bytes added, bytes needed beyond those held, ms."""

    other: Bytes
    held: Bytes
    needed: Bytes
    ms: NDArray[np.float64]


@dataclass(frozen=True)
class Keeping:
    """The intervals in which the nodes are kept that ``save_bytes`` has bytes for, and what else is known of them.

    ``cuts`` are the positions at which each of them is divided into segments; else ``inner`` may know better ones.
    """

    save_bytes: Bytes
    table: Intervals
    inner: Nested | None = None
    cuts: Bytes | None = None


@dataclass(frozen=True, eq=False)
class Way:
    """How an interval may run again: as ``table`` says, planned as ``inner`` says, with the nodes of ``keeping`` kept.

    ``number`` is that of its first decision in ``Space.decisions``; those for the levels of ``inner`` follow.
    """

    number: int
    table: Intervals
    inner: Nested | None
    keeping: Keeping | None


@dataclass(frozen=True)
class Keep:
    """What autograd saves of a node stays."""


@dataclass(frozen=True, eq=False)
class Recompute:
    """An interval runs again when backward reaches it, and is then all kept, or planned within ``level`` bytes."""

    way: Way
    level: int | None


Decision = Keep | Recompute
"""What a plan does with the storages of a node or an interval; to offload them would be a third."""


@dataclass(frozen=True)
class Space:
    """The plans there are: of intervals, of segments in them, and both again with nodes kept inside intervals."""

    table: Intervals
    inner: Nested | None = None
    keeping: tuple[Keeping, ...] = ()

    @functools.cached_property
    def ways(self) -> tuple[Way, ...]:
        """How an interval may run again: with nothing kept, and with each choice of nodes."""
        found = [Way(1, self.table, self.inner, None)]
        for each in self.keeping:
            before = found[-1]
            levels = 0 if before.inner is None else len(before.inner.levels)
            found.append(Way(before.number + 1 + levels, each.table, each.inner, each))
        return tuple(found)

    @functools.cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """All there are, by their numbers; to keep is the first."""
        levels = ((way, () if way.inner is None else way.inner.levels.tolist()) for way in self.ways)
        return (Keep(), *(Recompute(way, level) for way, several in levels for level in (None, *several)))

    def leading(self, b: int) -> Arcs:
        """All steps to position ``b``: a kept node, and intervals of every kind, in the order of where they start."""
        return self._leading[b]

    def leaving(self, a: int) -> Arcs:
        """All steps from position ``a``, in the order of where they end."""
        return self._leaving[a]

    @functools.cached_property
    def _leading(self) -> list[Arcs]:
        return [_together(list(self._steps(b))) for b in range(len(self.table) + 1)]

    @functools.cached_property
    def _leaving(self) -> list[Arcs]:
        a, held, needed, ms = (np.concatenate(each) for each in zip(*map(_columns, self._leading), strict=True))
        b = np.repeat(np.arange(len(self._leading)), [len(arcs.other) for arcs in self._leading])
        order = a.argsort(kind="stable")
        last = np.bincount(a, minlength=len(self._leading)).cumsum()
        b, held, needed, ms = b[order], held[order], needed[order], ms[order]
        return [Arcs(b[i:j], held[i:j], needed[i:j], ms[i:j]) for i, j in itertools.pairwise([0, *last])]

    def _steps(self, b: int) -> Iterator[Arcs]:
        if not b:
            return
        table, node = self.table, np.array([b - 1])
        need = np.maximum(np.maximum(table.work[node] + table.unsaved[0, b], table.forward[node]), 0)
        yield Arcs(node, table.keep[node], table.keep[node] + need, np.zeros(1))
        for way in self.ways:
            table, inner = way.table, way.inner
            a = np.flatnonzero(np.isfinite(table.ms[:b, b]))
            yield Arcs(a, table.held[a, b], table.peak[a, b], table.ms[a, b])
            if inner is not None and b in inner.cuts:
                end = int(np.searchsorted(inner.cuts, b))
                for number in range(len(inner.levels)):
                    here = np.flatnonzero(np.isfinite(inner.ms[:end, end, number]))
                    a = inner.cuts[here]
                    needed = table.base[a, b] + inner.need[here, end, number]
                    yield Arcs(a, table.held[a, b], needed, inner.ms[here, end, number])


def _together(each: list[Arcs]) -> Arcs:
    """All of them as one table."""
    if not each:
        none = np.empty(0, dtype=np.int64)
        return Arcs(none, none, none, np.empty(0))
    a, held, needed, ms = (np.concatenate(every) for every in zip(*map(_columns, each), strict=True))
    order = a.argsort(kind="stable")
    return Arcs(a[order], held[order], needed[order], ms[order])


def _columns(arcs: Arcs) -> tuple[Bytes, Bytes, Bytes, NDArray[np.float64]]:
    return arcs.other, arcs.held, arcs.needed, arcs.ms


def intervals(chain: Chain) -> Intervals:
    """Tabulate all intervals of a chain; entry [a, b] of each table is the interval [a, b)."""
    n = len(chain)
    saved = [(s, s.saver) for s in chain.storages if s.saver is not None]
    out = _count(n, [(s.producer, s.last_use, s.bytes) for s, _ in saved])
    passing = tuple(s for s in chain.storages if s.saver is None)
    used = _live_ins(n, passing)
    later = _count(n, [(s.producer, s.first_use, s.bytes) for s, _ in saved])
    unsaved = _count(n, [(s.producer, saver, s.bytes) for s, saver in saved])
    made = out[:, 0]
    held, base = np.zeros((n + 1, n + 1), dtype=np.int64), np.zeros((n + 1, n + 1), dtype=np.int64)
    peak = np.full((n + 1, n + 1), NEVER, dtype=np.int64)
    for a in range(n - 1, -1, -1):
        stop = int(chain.barrier[a])
        if stop == a:
            continue
        b = np.arange(a + 1, stop + 1)
        # live-ins that nobody saves are held for the interval; what is first used after it is free again by then
        live_in = used[a, b]
        held[a, b] = out[b, b] - out[a, b] + live_in
        base[a, b] = live_in - later[a, b]
        inside = unsaved[b, a] - unsaved[b, b] - (unsaved[a, a] - unsaved[a, b])
        backward = np.maximum.accumulate(inside + chain.work[a:stop])
        again = np.maximum.accumulate(made[b] - made[a] + chain.forward[a:stop]) + chain.pending[a:stop]
        peak[a, b] = np.maximum(backward, again) + base[a, b]
    least = np.minimum.accumulate(peak[:, ::-1], axis=1)[:, ::-1]
    keep = made[1:] - made[:-1]
    after = np.arange(1, n + 1)
    work = chain.work - unsaved[after, after]
    held, base, peak, ms = (by_end(each) for each in (held, base, peak, rerun_ms(chain)))
    return Intervals(held, base, peak, ms, keep, work, chain.forward + chain.left, later, unsaved, least, passing)


def by_end(table: NDArray[Any]) -> NDArray[Any]:
    """The same table, laid out so that all intervals with one end lie together."""
    return np.asfortranarray(table)


def keeping(table: Intervals, chain: Chain, save_bytes: Bytes) -> Intervals:
    """The same tables where every node is kept inside an interval that ``save_bytes`` has bytes for."""
    kept = save_bytes >= 0
    before = summed(np.where(kept, save_bytes, 0))
    count = summed(kept)
    still = replace(chain, ms=np.where(kept, 0.0, chain.ms), rerun_ms=np.where(kept, 0.0, chain.rerun_ms))
    a, b = np.ogrid[: len(before), : len(before)]
    ms = np.where(count[b] > count[a], rerun_ms(still), np.inf)
    return replace(table, held=by_end(table.held + before[b] - before[a]), ms=by_end(ms))


def summed(values: NDArray[Any]) -> Bytes:
    """At each position, the sum of the values before it."""
    return np.concatenate([[0], values.cumsum()])


def rerun_ms(chain: Chain) -> NDArray[np.float64]:
    """What it costs to run each interval again, infinite where it may not."""
    n = len(chain)
    ms = np.full((n + 1, n + 1), np.inf)
    time = np.concatenate([[0.0], chain.ms.cumsum()])
    last_save = np.maximum.accumulate(np.where(chain.saves, np.arange(n), -1))
    for a in range(n):
        b = np.arange(a + 1, int(chain.barrier[a]) + 1)
        j = last_save[b - 1]
        ms[a, b] = np.where(j >= a, time[j] - time[a] + chain.rerun_ms[j], 0.0) + chain.segment_ms
    return ms


def _live_ins(n: int, storages: Sequence[Held], start: int = 0) -> Bytes:
    """The bytes of ``storages`` that each interval [a, b) from ``start`` on uses and does not make.

    One that two intervals use counts in both: the planner does not know of one what it has decided of the other.
    """
    used = np.zeros((n + 1, n + 1), dtype=np.int64, order="F")  # as ``by_end`` lays it out
    if not storages:
        return used
    pairs = ((before, use, s.bytes) for s in storages for before, use in itertools.pairwise((s.producer, *s.uses)))
    following = [(max(before - start, -1), use - start, size) for before, use, size in pairs if use >= start]
    ahead = _count(n - start, following)  # made or used before x, and used next at y or later
    used[start:, start:] = np.diagonal(ahead)[:, None] - ahead[:, :-1]
    return used


def _count(n: int, entries: list[tuple[int, int, int]]) -> Bytes:
    """For (made at p, used at u, bytes): table[x, y] is the bytes made before x and used at y or later."""
    table = np.zeros((n + 1, n + 2), dtype=np.int64)
    for producer, use, size in entries:
        table[producer + 1, min(use, n)] += size
    return table.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
