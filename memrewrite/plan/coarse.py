"""A long chain as a shorter one whose every node stands for a few: segments begin and end only between those."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Bytes, Chain, Held, Plan

_LONGEST = 1500  # nodes; planning time grows with the square: seconds at this length


@dataclass(frozen=True)
class Coarse:
    """``chain`` stands for a longer one: its node i for the nodes ``starts[i]`` to ``starts[i + 1]`` of that."""

    chain: Chain
    starts: NDArray[np.int64]

    def expand(self, plan: Plan) -> Plan:
        """The plan for the longer chain that a plan for ``chain`` means."""
        return Plan(self._longer(plan.intervals), plan.ms, self._longer(plan.keeping))

    def _longer(self, intervals: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((int(self.starts[a]), int(self.starts[b])) for a, b in intervals)


def coarsen(chain: Chain, longest: int = _LONGEST) -> Coarse:
    """Merge nodes that make and cost nothing (views) into the node before them, then, down to ``longest``, others.

    Of those the boundaries stay that the fewest bytes cross, one of every stretch of the chain.
    """
    n = len(chain)
    makes = np.zeros(n, dtype=np.bool_)
    makes[[s.producer for s in chain.storages]] = True
    begins = chain.barrier > np.arange(n)
    fixed = np.append(True, begins[1:] != begins[:-1])[:n] | ~begins
    boundary = fixed | makes | (chain.ms > 0)
    if boundary.sum() > longest:
        boundary = fixed | _lightest(boundary, crossing(len(chain), chain.storages), longest)
    return _merged(chain, np.append(np.flatnonzero(boundary), n))


def cuts(chain: Chain, most: int) -> Bytes:
    """Up to ``most`` positions where few bytes cross, spread over the chain, with its beginning and its end."""
    inside = (chain.barrier > np.arange(len(chain))) & (np.arange(len(chain)) > 0)
    if most > 2 and inside.any():
        inside = _lightest(inside, crossing(len(chain), chain.storages), min(most - 2, int(inside.sum())))
    else:
        inside = np.zeros_like(inside)
    return np.array([0, *np.flatnonzero(inside), len(chain)], dtype=np.int64)


def crossing(n: int, storages: Iterable[Held]) -> Bytes:
    """For each of ``n`` nodes, the bytes of ``storages`` made before it and used by it or after it."""
    steps = np.zeros(n + 1, dtype=np.int64)
    for s in storages:
        steps[s.producer + 1] += s.bytes
        steps[min(s.last_use, n - 1) + 1] -= s.bytes
    return np.cumsum(steps)[:-1]


def _lightest(boundary: NDArray[np.bool_], crossing: Bytes, longest: int) -> NDArray[np.bool_]:
    """Of the boundaries, one in each of ``longest`` stretches: where the fewest bytes cross."""
    chosen = np.zeros(len(boundary), dtype=np.bool_)
    for stretch in np.array_split(np.flatnonzero(boundary), longest):
        chosen[stretch[crossing[stretch].argmin()]] = True
    return chosen


def _merged(chain: Chain, starts: NDArray[np.int64]) -> Coarse:
    """The chain of the groups that begin at ``starts``; its last entry is the end of the chain."""
    if len(starts) == len(chain) + 1:
        return Coarse(chain, starts)
    group = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    first = starts[:-1]
    before = np.append(0.0, np.cumsum(chain.ms))
    elapsed = before[:-1] - before[starts[group]]
    until_save = np.where(chain.saves, elapsed + chain.rerun_ms, 0.0)

    def at(node: int) -> int:
        return int(group[node]) if node < len(chain) else len(first)

    return Coarse(
        Chain(
            ms=np.add.reduceat(chain.ms, first),
            rerun_ms=np.maximum.reduceat(until_save, first),
            saves=np.logical_or.reduceat(chain.saves, first),
            barrier=np.array([at(int(end)) for end in chain.barrier[first]], dtype=np.int64),
            work=np.maximum.reduceat(chain.work, first),
            forward=np.maximum.reduceat(chain.forward, first),
            pending=np.maximum.reduceat(chain.pending, first),
            storages=tuple(
                Held(
                    s.bytes,
                    at(s.producer),
                    tuple(dict.fromkeys(map(at, s.uses))),
                    None if s.saver is None else at(s.saver),
                )
                for s in chain.storages
            ),
            segment_ms=chain.segment_ms,
            gradients=chain.gradients,
            left=chain.left,
            save_bytes=tuple(np.maximum.reduceat(save_bytes, first) for save_bytes in chain.save_bytes),
            on_demand=chain.on_demand,
        ),
        starts,
    )
