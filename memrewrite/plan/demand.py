"""Segments that ``torch.compile`` runs again: a node at a time, as backward asks for what it makes, and each node once.

So it costs nothing more to divide a segment with kept nodes into segments. What crosses such a cut is made again when
backward comes to the segment, and stays until backward is through with it. A cut is where that is little, and where
little else is made on the way from what is kept, as in a sum of branches that all end in kept nodes.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from memrewrite.plan.coarse import crossing
from memrewrite.plan.segments import Bytes, Chain
from memrewrite.plan.tables import NEVER, Intervals, Keeping, by_end, keeping, summed

_AROUND = 6  # nodes before and after a cut that no fewer bytes cross
_MORE = 1.25  # times as many bytes as cross its neighbours
_BESIDES = 0.25  # of what crosses a cut, as much besides may be held from where it is made again


def keeping_on_demand(table: Intervals, chain: Chain, save_bytes: Bytes) -> Keeping:
    """The segments in which the nodes are kept that ``save_bytes`` has bytes for, which begin where few cross."""
    across = crossing(len(chain), [s for s in chain.storages if save_bytes[s.producer] < 0])
    light = _light(across)
    cuts = _cuts(chain, save_bytes, _lightest(light, across), across)
    ends = np.unique([0, *light, len(chain)])
    usual = keeping(table, chain, save_bytes)
    kept, saved = summed(np.maximum(save_bytes, 0)), summed(_saved(chain, save_bytes >= 0))
    inside = np.where(table.peak < NEVER, table.peak - table.base - (saved - saved[:, None]), NEVER)
    need = np.full_like(table.peak, NEVER)
    ms = np.full_like(usual.ms, np.inf)
    for a in ends[:-1]:
        starts = np.append(a, cuts[cuts > a])
        remade = np.append(0, across[starts[1:]].cumsum())
        through = np.maximum.accumulate(np.append(0, remade[:-1] + inside[starts[:-1], starts[1:]]))
        b = ends[(ends > a) & np.isfinite(usual.ms[a, ends])]
        piece = np.searchsorted(starts, b) - 1
        most = np.maximum(through[piece], remade[piece] + inside[starts[piece], b])
        need[a, b] = table.base[a, b] + kept[b] - kept[a] + most
        ms[a, b] = usual.ms[a, b]
    for s in chain.storages:  # what is kept and used after the segment counts once
        if save_bytes[s.producer] >= 0 and s.saver is not None:
            usual.held[: s.producer + 1, s.producer + 1 : s.last_use + 1] -= s.bytes
    return Keeping(save_bytes, replace(usual, peak=by_end(need), ms=by_end(ms)), cuts=cuts)


def pieces(choice: Keeping, a: int, b: int) -> list[tuple[int, int]]:
    """The segments that the segment [a, b) is divided into; none where there is no cut in it."""
    if choice.cuts is None or not (inside := [int(cut) for cut in choice.cuts if a < cut < b]):
        return []
    return list(zip([a, *inside], [*inside, b], strict=True))


def _saved(chain: Chain, nodes: NDArray[np.bool_]) -> Bytes:
    """Of what each of ``nodes`` makes, the bytes that autograd keeps."""
    found = np.zeros(len(chain), dtype=np.int64)
    for s in chain.storages:
        if nodes[s.producer] and s.saver is not None:
            found[s.producer] += s.bytes
    return found


def _light(across: Bytes) -> Bytes:
    """The positions inside the chain where the fewest bytes cross of all those around, the first of several."""
    inside = across[1:]
    if not len(inside):
        return np.zeros(0, dtype=np.int64)
    around = sliding_window_view(np.pad(inside, _AROUND, mode="edge"), 2 * _AROUND + 1)
    return np.flatnonzero((inside == around.min(axis=1)) & (inside != across[:-1])) + 1


def _lightest(light: Bytes, across: Bytes) -> Bytes:
    """Of the ``light`` positions, those that few more bytes cross than the lightest of the two before or after."""
    sizes = np.pad(across[light], 2, mode="constant", constant_values=NEVER)
    before, after = np.minimum(sizes[:-4], sizes[1:-3]), np.minimum(sizes[3:-1], sizes[4:])
    return light[across[light] <= _MORE * np.maximum(before, after)]


def _cuts(chain: Chain, save_bytes: Bytes, light: Bytes, across: Bytes) -> Bytes:
    """Of the ``light`` positions, those where little besides what crosses them is made again, and held, for that."""
    reads, makes = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, s in enumerate(chain.storages):
        makes[s.producer].append(number)
        for use in s.uses:
            reads[use].append(number)
    found: list[int] = []
    there: set[int] = set()  # what crosses the last one
    for position in light:
        here = {
            i
            for i, s in enumerate(chain.storages)
            if s.producer < position <= s.last_use and save_bytes[s.producer] < 0
        }
        nodes = {chain.storages[i].producer for i in here - there}
        ahead = list(nodes)
        while ahead:
            needed = {chain.storages[i].producer for i in reads[ahead.pop()] if i not in there}
            ahead += (more := {node for node in needed - nodes if save_bytes[node] < 0})
            nodes |= more
        besides = [chain.storages[i] for node in nodes for i in makes[node] if i not in here]
        held = sum(s.bytes for s in besides if s.saver is not None)
        if held <= _BESIDES * across[position]:
            found.append(int(position))
            there = here
    return np.array(found, dtype=np.int64)
