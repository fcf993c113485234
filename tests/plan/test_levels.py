"""Plans under several bounds at once are those under one bound after the other."""

import numpy as np
import pytest

from memrewrite.plan.dp import _walk, lowest_bound
from memrewrite.plan.levels import cheapest_under_each
from memrewrite.plan.tables import Space, intervals
from tests.support.random_chains import random_chain


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("slots", [4, 32])
def test_each_bound_is_planned_as_if_it_were_alone(seed: int, slots: int) -> None:
    table = intervals(random_chain(seed)[1])
    n = len(table)
    lowest = lowest_bound(table, int(table.keep.sum() + table.work.max()))
    levels = np.geomspace(lowest / 8, 2 * lowest, 7).astype(np.int64)
    for start, stop in ((0, n), (n // 4, n - 2)):
        outside, positions = table.live_ins(start), np.arange(stop - start + 1)
        ms, need = cheapest_under_each(table, start, stop, levels, slots, outside)
        for number, level in enumerate(levels):
            alone, needed = _walk(Space(table), start, stop, int(level), slots, outside).least(positions)
            assert np.array_equal(ms[:, number], alone)
            there = np.isfinite(alone)
            assert np.array_equal(need[there, number], needed[there])
