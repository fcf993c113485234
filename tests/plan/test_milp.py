"""The planner against the exact optimum: within 1 % on random graphs of 10 to 40 nodes."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrewrite.plan.dp import plan, with_nested
from memrewrite.plan.segments import Chain, Plan
from memrewrite.plan.tables import Space, intervals
from tests.plan.test_plan import Interval, all_plans, chains, evaluate
from tests.support.milp import GRAPHS, WITHIN, Program, graph, optimum, summary
from tests.support.random_chains import KINDS, random_chain

SMALL = settings(max_examples=60, deadline=None, derandomize=True)
SEEDS = pytest.mark.parametrize("seed", range(GRAPHS))


def within(chain: Chain, a: int, b: int) -> Iterator[tuple[Interval, ...]]:
    """Every set of disjoint intervals in [a, b) but [a, b) itself."""
    for chosen in all_plans(chain):
        if all(a <= c and d <= b and (c, d) != (a, b) for c, d in chosen):
            yield chosen


def all_plans_with_segments_in_segments(chain: Chain) -> Iterator[tuple[Interval, ...]]:
    inside = {(a, b): list(within(chain, a, b)) for a, b in itertools.combinations(range(len(chain) + 1), 2)}
    for chosen in all_plans(chain):
        for insides in itertools.product(*(inside[pair] for pair in chosen)):
            yield tuple(pair for outer, inner in zip(chosen, insides, strict=True) for pair in (outer, *inner))


def check(chain: Chain, found: Plan | None, bound: int) -> None:
    """A plan keeps its word: disjoint legal intervals, or one level in another, at its price, within the bound."""
    if found is not None:
        most, ms = evaluate(chain, found.intervals)
        assert most <= bound
        assert found.ms == pytest.approx(ms)
        assert all(a < b <= chain.barrier[a] for a, b in found.intervals)


@SMALL
@given(chains(), st.integers(0, 40))
def test_the_optimum_is_the_cheapest_of_all_plans(chain: Chain, bound: int) -> None:
    evaluated = [evaluate(chain, chosen) for chosen in all_plans(chain)]
    costs = [ms for most, ms in evaluated if most <= bound]
    best = optimum(chain, bound)
    assert (best.ms if best else None) == (pytest.approx(min(costs)) if costs else None)
    assert Program.of(chain).lowest() == min(most for most, _ in evaluated)


@SMALL
@given(chains(longest=5), st.integers(0, 31))
def test_segments_in_segments_are_the_cheapest_of_all(chain: Chain, bound: int) -> None:
    table = intervals(chain)
    everywhere = with_nested(Space(table), np.arange(len(chain) + 1), np.arange(100))
    found = plan(everywhere, bound)
    check(chain, found, bound)
    evaluated = (evaluate(chain, chosen) for chosen in all_plans_with_segments_in_segments(chain))
    costs = [ms for most, ms in evaluated if most <= bound]
    assert (found.ms if found else None) == (pytest.approx(min(costs)) if costs else None)


@SEEDS
def test_within_one_percent_of_the_optimum(seed: int) -> None:
    of = graph(seed)
    for case in of.cases:
        check(of.chain, case.flat, case.bound)
        assert case.ratio <= WITHIN, str(case)
        assert case.ratio >= 1 - 1e-6, f"the optimum is none: {case}"


@SEEDS
def test_segments_in_segments_cost_no_more(seed: int) -> None:
    of = graph(seed)
    for case in of.cases:
        check(of.chain, case.nested, case.bound)
        assert case.nested_ratio <= WITHIN, str(case)


@SEEDS
def test_there_is_a_plan_just_where_there_can_be_one(seed: int) -> None:
    of = graph(seed)
    assert plan(of.table, of.lowest) is not None
    assert plan(of.table, of.lowest - 1) is None
    assert optimum(of.chain, of.lowest - 1) is None


def test_the_graphs_are_many_and_unlike() -> None:
    known = [random_chain(seed) for seed in range(GRAPHS)]
    lengths = {len(chain) for _, chain in known}
    assert GRAPHS >= 50
    assert {kind for kind, _ in known} == set(KINDS)
    assert min(lengths) >= 10
    assert max(lengths) == 40
    sizes = [s.bytes for _, chain in known for s in chain.storages]
    assert min(sizes) == 512
    assert max(sizes) > 8e6
    assert all(size % 512 == 0 for size in sizes)
    assert any(chain.barrier[a] == a for _, chain in known for a in range(len(chain)))
    assert any(s.last_use - s.producer > len(chain) // 2 for _, chain in known for s in chain.storages)
    segments = {len(case.optimum.intervals) for seed in range(GRAPHS) for case in graph(seed).cases}
    assert max(segments) >= 6


def test_the_worst_and_the_median_of_all_graphs() -> None:
    worst, median = summary([case for seed in range(GRAPHS) for case in graph(seed).cases])
    assert worst <= WITHIN, f"worst {worst:.5f}, median {median:.5f}"
    assert median <= 1 + 1e-6, f"worst {worst:.5f}, median {median:.5f}"
