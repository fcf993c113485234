"""Plans under several bounds at once are those under one bound after the other."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from memrewrite.plan.dp import _Labels, _walk, lowest_bound
from memrewrite.plan.levels import cheapest_under_each
from memrewrite.plan.segments import Bytes
from memrewrite.plan.tables import Intervals, Space, intervals
from tests.support.random_chains import random_chain


def needed_by(labels: _Labels, table: Intervals, start: int, outside: Bytes) -> Bytes:
    """How many bytes each label needs at most on the way."""
    found = np.zeros(len(labels.position), dtype=np.int64)
    for label in range(1, int(labels.first[-1])):
        origin, b = labels._origin[label], start + int(labels.position[label])
        if labels._decision[label]:
            more = table.ending_at(b, start, outside)[1][labels.position[origin]]
        else:
            more = table.keep[b - 1] + max(table.work[b - 1] + table.unsaved[start, b], table.forward[b - 1])
        found[label] = max(found[origin], labels.held[origin] + more)
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("slots", [4, 32])
def test_each_cost_and_bound_is_planned_as_if_it_were_alone(seed: int, slots: int) -> None:
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
            last = walked.first[positions + 1] - 1  # the cheapest: they are in order of bytes, so of falling cost
            there = last >= walked.first[positions]
            assert np.array_equal(ms[:, k, number], np.where(there, walked.ms[last], np.inf))
            needed = needed_by(walked, table, start, outside)
            assert np.array_equal(need[there, k, number], needed[last[there]])


@pytest.mark.parametrize("seed", range(4))
def test_what_intervals_use_of_what_was_made_before(seed: int) -> None:
    table = intervals(random_chain(seed)[1])
    n = len(table)
    for start in (0, n // 3, n - 1):
        found, before = table.live_ins(start), [s for s in table.passing if s.producer < start]
        for a in range(start, n):
            for b in range(a + 1, n + 1):
                assert found[a, b] == sum(s.bytes for s in before if any(a <= use < b for use in s.uses))
