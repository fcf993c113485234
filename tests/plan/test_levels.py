"""Plans under several bounds at once are those under one bound after the other."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memrewrite.plan import dp
from memrewrite.plan.dp import _Labels, _Moves, _walk, lowest_bound
from memrewrite.plan.levels import cheapest_under_each
from memrewrite.plan.tables import Space, intervals
from tests.support.random_chains import random_chain


class Noting(_Labels):
    """Labels that know how many bytes they need at most on the way."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.needed = np.zeros(len(self.position), dtype=np.int64)

    def add(self, moves: _Moves) -> None:
        super().add(moves)
        new = np.arange(self.first[self._next - 1], self.first[self._next])
        by = dict(zip(zip(moves.origin, moves.decision, strict=True), moves.needed, strict=True))
        for label in new:
            origin = self._origin[label]
            self.needed[label] = max(self.needed[origin], by[origin, self._decision[label]])

    def least(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The cost of the cheapest label of each position, infinite where there is none, and the bytes it needs."""
        last = self.first[positions + 1] - 1  # they are in order of bytes, so of falling cost
        return np.where(last >= self.first[positions], self.ms[last], np.inf), self.needed[last]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("slots", [4, 32])
def test_each_cost_and_bound_is_planned_as_if_it_were_alone(
    seed: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dp, "_Labels", Noting)
    table = intervals(random_chain(seed)[1])
    n, random = len(table), np.random.default_rng(seed)
    costs = [table.ms, np.where(random.random(table.ms.shape) < 0.8, table.ms * random.random(n + 1), np.inf)]
    lowest = lowest_bound(table, int(table.keep.sum() + table.work.max()))
    levels = np.geomspace(lowest / 8, 2 * lowest, 7).astype(np.int64)
    for start, stop in ((0, n), (n // 4, n - 2)):
        outside, positions = table.live_ins(start), np.arange(stop - start + 1)
        ms, need = cheapest_under_each(table, costs, start, stop, levels, slots, outside)
        for k, number in itertools.product(range(len(costs)), range(len(levels))):
            among = Space(replace(table, ms=costs[k]))
            walked = _walk(among, start, stop, int(levels[number]), slots, outside)
            assert isinstance(walked, Noting)
            alone, needed = walked.least(positions)
            assert np.array_equal(ms[:, k, number], alone)
            there = np.isfinite(alone)
            assert np.array_equal(need[there, k, number], needed[there])


@pytest.mark.parametrize("seed", range(4))
def test_what_intervals_use_of_what_was_made_before(seed: int) -> None:
    table = intervals(random_chain(seed)[1])
    n = len(table)
    for start in (0, n // 3, n - 1):
        found, before = table.live_ins(start), [s for s in table.passing if s.producer < start]
        for a in range(start, n):
            for b in range(a + 1, n + 1):
                assert found[a, b] == sum(s.bytes for s in before if any(a <= use < b for use in s.uses))
