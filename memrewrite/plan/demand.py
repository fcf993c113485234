"""Segments that ``torch.compile`` runs again: a node at a time, as backward asks for what it makes, and each node once.

So it costs nothing more to divide a segment with kept nodes into segments. What crosses such a cut is made again when
backward comes to the segment, and stays until backward is through with it. A cut is where that is little, and where it
can be made again of what is kept without running a product further back than the cut before: a sum of branches that
all end in kept nodes, say.
"""

from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes, Chain
from memrewrite.plan.tables import NEVER, Intervals, Keeping, by_end, keeping, summed

_AROUND = 6  # nodes before and after a cut that no fewer bytes cross


def keeping_on_demand(table: Intervals, chain: Chain, own: Bytes) -> Keeping:
    """The segments in which the nodes are kept that ``own`` has bytes for; they begin and end where few bytes cross."""
    crossing = _crossing(chain, own < 0)
    light = _light(crossing)
    cuts = _cuts(chain, own, light)
    ends = np.unique([0, *light, len(chain)])
    usual = keeping(table, chain, own)
    kept = summed(np.maximum(own, 0))
    inside = table.peak - table.base - np.minimum(kept - kept[:, None], table.peak // 2)
    need = np.full_like(table.peak, NEVER)
    ms = np.full_like(usual.ms, np.inf)
    for a in ends[:-1]:
        starts = np.append(a, cuts[cuts > a])
        remade = np.append(0, crossing[starts[1:]].cumsum())
        held = remade + kept[starts] - kept[a]
        through = np.maximum.accumulate(np.append(0, held[:-1] + inside[starts[:-1], starts[1:]]))
        b = ends[(ends > a) & np.isfinite(usual.ms[a, ends])]
        piece = np.searchsorted(starts, b) - 1
        need[a, b] = table.base[a, b] + np.maximum(through[piece], held[piece] + inside[starts[piece], b])
        ms[a, b] = usual.ms[a, b]
    for s in chain.storages:  # what is kept and used after the segment counts once
        if own[s.producer] >= 0 and s.saver is not None:
            usual.held[: s.producer + 1, s.producer + 1 : s.last_use + 1] -= s.bytes
    return Keeping(own, replace(usual, peak=by_end(need), ms=by_end(ms)), cuts=cuts)


def pieces(choice: Keeping, a: int, b: int) -> list[tuple[int, int]]:
    """The segments that the segment [a, b) is divided into; none where there is no cut in it."""
    if choice.cuts is None or not (inside := [int(cut) for cut in choice.cuts if a < cut < b]):
        return []
    return list(zip([a, *inside], [*inside, b], strict=True))


def _crossing(chain: Chain, made_again: NDArray[np.bool_]) -> Bytes:
    """At each position, the bytes of what is made before it by nodes ``made_again`` and used at it or later."""
    steps = np.zeros(len(chain) + 1, dtype=np.int64)
    for s in chain.storages:
        if made_again[s.producer]:
            steps[s.producer + 1] += s.bytes
            steps[min(s.last_use, len(chain) - 1) + 1] -= s.bytes
    return steps.cumsum()


def _light(crossing: Bytes) -> Bytes:
    """The positions inside the chain where the fewest bytes cross of all those around, the first of several."""
    inside = crossing[1:-1]
    if not len(inside):
        return np.zeros(0, dtype=np.int64)
    around = sliding_window_view(np.pad(inside, _AROUND, mode="edge"), 2 * _AROUND + 1)
    return np.flatnonzero((inside == around.min(axis=1)) & (inside != crossing[:-2])) + 1


def _cuts(chain: Chain, own: Bytes, light: Bytes) -> Bytes:
    """Of the ``light`` positions, those before which nothing dear runs for what crosses them, back to the last one."""
    n = len(chain)
    kept = own >= 0
    read: list[list[int]] = [[] for _ in range(n + 1)]
    for s in chain.storages:
        for use in s.uses:
            read[min(use, n)].append(s.producer)
    back = np.full(n, n)  # the first product that runs for the value of a node
    for node in np.flatnonzero(~kept):
        before = [back[source] for source in read[node] if source < node]
        back[node] = min([node if chain.own[0][node] >= 0 else n, *before])
    found = [0]
    for position in light:
        made = [s.producer for s in chain.storages if s.producer < position <= s.last_use and not kept[s.producer]]
        if all(back[each] >= found[-1] for each in made):
            found.append(int(position))
    return np.array(found[1:], dtype=np.int64)
