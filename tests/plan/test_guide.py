"""What can be held at each position is known exactly, and the cost to go is about right."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memrewrite.plan.dp import lowest_bound, plan, possible
from memrewrite.plan.guide import guide, heaviest, lightest
from memrewrite.plan.segments import Chain
from memrewrite.plan.tables import NEVER, Keeping, Space, intervals
from memrewrite.plan.tables import keeping as keep
from tests.plan.test_plan import SMALL, Interval, all_plans, chains, evaluate, interval_facts, kept_facts
from tests.support.milp import GRAPHS
from tests.support.random_chains import random_chain


def held_on_the_way(chain: Chain, chosen: tuple[Interval, ...]) -> list[tuple[int, int]]:
    """The positions a plan passes and the bytes it holds there."""
    ends, held, i = dict(chosen), 0, 0
    passed = [(0, 0)]
    while i < len(chain):
        held += interval_facts(chain, i, ends[i])[0] if i in ends else kept_facts(chain, i)[0]
        i = ends.get(i, i + 1)
        passed.append((i, held))
    return passed


@SMALL
@given(chains(), st.integers(0, 40))
def test_limits_are_those_of_all_plans(chain: Chain, bound: int) -> None:
    among = Space(intervals(chain))
    plans = [chosen for chosen in all_plans(chain) if evaluate(chain, chosen)[0] <= bound]
    passed = list(itertools.chain.from_iterable(held_on_the_way(chain, chosen) for chosen in plans))
    light, heavy = lightest(among, bound), heaviest(among, bound)
    assert possible(among, bound) == bool(plans) == (heavy[0] >= 0)
    for position in range(len(chain) + 1):
        held = [size for at, size in passed if at == position]
        if held:
            assert light[position] == min(held)
            assert max(held) <= heavy[position]
        else:
            assert light[position] > heavy[position]


@SMALL
@given(chains(), st.integers(0, 40))
def test_there_is_a_guide_where_there_is_a_plan(chain: Chain, bound: int) -> None:
    found = guide(Space(intervals(chain)), bound)
    best = plan(intervals(chain), bound)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert np.isfinite(found.ms(0, np.zeros(1, dtype=np.int64))).all()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(0, GRAPHS, 5))
def test_the_cost_to_go_is_about_that_of_the_plan(seed: int, share: float) -> None:
    chain = random_chain(seed)[1]
    among = Space(intervals(chain))
    everything = max(evaluate(chain, ())[0], 1)
    lowest = lowest_bound(among, everything)
    bound = int(lowest + share * (everything - lowest))
    found, best = guide(among, bound), plan(among, bound)
    assert found is not None
    assert best is not None
    assert found.ms(0, np.zeros(1, dtype=np.int64))[0] == pytest.approx(best.ms, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_the_cost_to_go_is_the_least_by_any_arc(seed: int) -> None:
    chain = random_chain(seed)[1]
    keeping = tuple(Keeping(saved, keep(intervals(chain), chain, saved)) for saved in [np.arange(len(chain)) % 3 - 1])
    among = Space(intervals(chain), keeping=keeping)
    bound = 2 * lowest_bound(among, int(among.table.keep.sum() + among.table.work.max()))
    found = guide(among, bound)
    assert found is not None
    expected = np.full_like(found.rest, np.inf)
    expected[-1] = 0.0
    share = np.arange(found.rest.shape[1])
    for b in range(len(chain), 0, -1):
        arcs = among.leading(b)
        for a, held, needed, ms in zip(arcs.other, arcs.held, arcs.needed, arcs.ms, strict=True):
            at = found.lightest[a] + (found.heaviest[a] - found.lightest[a]) / share[-1] * share
            within = at <= min(bound - needed, found.heaviest[b] - held) + 0.5
            if found.lightest[a] <= found.heaviest[a] and within.any():
                np.fmin(expected[a], found.ms(b, at + held) + ms, out=expected[a], where=within)
    assert np.array_equal(found.rest, expected)


def test_the_best_labels_are_those_of_the_least_cost_in_all() -> None:
    found = guide(Space(intervals(random_chain(3)[1])), 10**12)
    assert found is not None
    held = np.arange(0, 50_000, 512, dtype=np.int64)
    ms = np.linspace(9.0, 1.0, len(held))
    best = found.best(1, held, ms, 5)
    total = ms + found.ms(1, held)
    assert sorted(total[best]) == sorted(total)[:5]
    assert (np.diff(best) > 0).all()


def test_labels_from_which_no_plan_leads_on_are_dropped() -> None:
    chain = random_chain(3)[1]
    among = Space(intervals(chain))
    found = guide(among, lowest_bound(among, evaluate(chain, ())[0]))
    assert found is not None
    middle = int(np.flatnonzero(found.lightest[1:-1] < NEVER)[0]) + 1
    held = np.array([found.lightest[middle], found.heaviest[middle], found.heaviest[middle] + 1])
    assert found.best(middle, np.sort(held), np.ones(3), 8).tolist() == [0, 1]
