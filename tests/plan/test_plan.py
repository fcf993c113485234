"""The planner against an evaluator written down straight from the cost model, and the search around it."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memrewrite.plan import refine
from memrewrite.plan.coarse import coarsen, cuts
from memrewrite.plan.dp import lowest_bound, plan, with_nested
from memrewrite.plan.refine import ALIKE, Fitted, Search, Simulate
from memrewrite.plan.segments import Chain, Held, Plan
from memrewrite.plan.tables import Space, intervals
from memrewrite.process import beside

Interval = tuple[int, int]
SMALL = settings(max_examples=80, deadline=None, derandomize=True)


@st.composite
def chains(draw: st.DrawFn, longest: int = 7, unit: int = 1) -> Chain:
    """Random chains; sizes are multiples of ``unit`` bytes."""
    n = draw(st.integers(1, longest))
    storages = []
    for _ in range(draw(st.integers(0, 2 * n))):
        producer = draw(st.integers(0, n - 1))
        last = draw(st.integers(producer, n))
        first = draw(st.integers(min(producer + 1, last), last))
        saver = draw(st.one_of(st.none(), st.integers(producer, min(last, n - 1))))
        uses = tuple(sorted({first, draw(st.integers(first, last)), last}))
        storages.append(Held(unit * draw(st.integers(1, 9)), producer, uses, saver))
    ms = np.array(draw(st.lists(st.integers(1, 20), min_size=n, max_size=n)), dtype=float)
    share = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n)))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    work, forward, pending = (
        unit * np.array(draw(st.lists(st.integers(0, most), min_size=n, max_size=n)), dtype=np.int64)
        for most in (5, 5, 3)
    )
    return Chain(
        ms=ms,
        rerun_ms=ms * share,
        saves=np.array(draw(flags)),
        barrier=np.array([draw(st.sampled_from([i, *range(i, n + 1), n, n, n])) for i in range(n)], dtype=np.int64),
        work=work,
        forward=forward,
        pending=pending,
        storages=tuple(storages),
        segment_ms=draw(st.sampled_from([0.0, 3.0])),
    )


def interval_facts(chain: Chain, a: int, b: int, since: int = 0) -> tuple[int, int, int, float]:
    """(held, base, peak, ms) of the interval [a, b), from the sentences of the cost model, one storage at a time.

    Only what is made at node ``since`` or later counts.
    """
    held = base = 0
    for s in chain.storages:
        if s.producer < since:
            continue
        if s.saver is not None and a <= s.producer < b <= s.last_use:
            held += s.bytes  # saved, and used after the interval: a live-out
        if s.saver is None and s.producer < a and any(a <= use < b for use in s.uses):
            held += s.bytes  # nobody saves it, but the interval needs it to run again
            base += s.bytes
        if s.saver is not None and s.producer < a and s.first_use >= b:
            base -= s.bytes  # saved before, first used after: free again when backward comes here
    peak = -(10**15)
    for last in range(a, b):
        inside = sum(
            s.bytes
            for s in chain.storages
            if s.saver is not None and s.producer < last + 1 and a <= s.saver <= last
            if s.producer >= a
        )
        made = sum(s.bytes for s in chain.storages if s.saver is not None and a <= s.producer <= last)
        peak = max(peak, inside + int(chain.work[last]), made + int(chain.forward[last] + chain.pending[b - 1]))
    savers = [i for i in range(a, b) if chain.saves[i]]
    rerun = sum(chain.ms[a : savers[-1]]) + chain.rerun_ms[savers[-1]] if savers else 0.0
    return held, base, peak + base, float(rerun) + chain.segment_ms


def kept_facts(chain: Chain, i: int, since: int = 0) -> tuple[int, int]:
    """(held after, working bytes) of the kept node ``i``; only what is made at ``since`` or later counts."""
    here = [s for s in chain.storages if s.saver is not None and s.producer >= since]
    made = sum(s.bytes for s in here if s.producer == i)
    free = sum(s.bytes for s in here if s.producer <= i < (s.saver or 0))
    return made, max(int(chain.work[i]) - free, int(chain.forward[i]))


def evaluate(chain: Chain, chosen: tuple[Interval, ...]) -> tuple[int, float]:
    """(estimated peak, ms) of a plan, which may hold intervals inside intervals."""
    return walk(chain, chosen, 0, len(chain))


def walk(chain: Chain, chosen: tuple[Interval, ...], since: int, end: int) -> tuple[int, float]:
    """``evaluate`` of the nodes [since, end): from left to right."""
    ends = {a: b for a, b in reversed(chosen) if since <= a and b <= end}  # the outermost that begins at a
    held, most, ms, i = 0, 0, 0.0, since
    while i < end:
        if i in ends:
            b = ends[i]
            more, base, peak, cost = interval_facts(chain, i, b, since)
            within = tuple((c, d) for c, d in chosen if i <= c and d <= b and (c, d) != (i, b))
            if within:
                inside, extra = walk(chain, within, i, b)
                peak, cost = base + inside, cost + extra
            most = max(most, held + peak, held + more)
            held, ms, i = held + more, ms + cost, b
        else:
            more, work = kept_facts(chain, i, since)
            held += more
            most = max(most, held, held + work)
            i += 1
    return most, ms


def all_plans(chain: Chain) -> Iterator[tuple[Interval, ...]]:
    """Every set of disjoint intervals that may run again."""

    def after(start: int) -> Iterator[tuple[Interval, ...]]:
        yield ()
        for a in range(start, len(chain)):
            for b in range(a + 1, len(chain) + 1):
                if b <= chain.barrier[a]:
                    for rest in after(b):
                        yield ((a, b), *rest)

    return after(0)


@SMALL
@given(chains(longest=12))
def test_the_tables_say_what_the_cost_model_says(chain: Chain) -> None:
    table = intervals(chain)
    for a, b in itertools.combinations(range(len(chain) + 1), 2):
        if b <= chain.barrier[a]:
            held, base, peak, ms = interval_facts(chain, a, b)
            assert (table.held[a, b], table.base[a, b], table.peak[a, b]) == (held, base, peak)
            assert table.ms[a, b] == pytest.approx(ms)
        else:
            assert np.isinf(table.ms[a, b])
    for i in range(len(chain)):
        assert (table.keep[i], max(table.work[i], table.forward[i])) == kept_facts(chain, i)


@SMALL
@given(chains(), st.integers(0, 40))
def test_the_plan_is_the_cheapest_of_all(chain: Chain, bound: int) -> None:
    found = plan(intervals(chain), bound)
    costs = [ms for chosen in all_plans(chain) for most, ms in [evaluate(chain, chosen)] if most <= bound]
    if found is None:
        assert not costs
        return
    most, ms = evaluate(chain, found.intervals)
    assert most <= bound
    assert found.ms == pytest.approx(ms)
    assert ms == pytest.approx(min(costs))


@SMALL
@given(chains(longest=6, unit=10_007), st.integers(0, 40))
def test_large_sizes_never_break_the_bound_and_lose_at_most_a_slot(chain: Chain, units: int) -> None:
    bound = 10_007 * units
    found = plan(intervals(chain), bound)
    evaluated = [evaluate(chain, chosen) for chosen in all_plans(chain)]
    slack = len(chain) * (bound // 63 + 1)
    if found is None:
        assert all(most > bound - slack for most, _ in evaluated)
        return
    assert evaluate(chain, found.intervals)[0] <= bound
    assert found.ms >= min(ms for most, ms in evaluated if most <= bound) - 1e-9


@SMALL
@given(chains(longest=10))
def test_intervals_are_disjoint_ordered_and_legal_and_more_memory_never_costs_more(chain: Chain) -> None:
    table = intervals(chain)
    before = np.inf
    for bound in range(0, 60, 3):
        found = plan(table, bound)
        if found is None:
            assert before == np.inf
            continue
        assert found.ms <= before + 1e-9
        before = found.ms
        ends = [0, *itertools.chain.from_iterable(found.intervals), len(chain)]
        assert ends == sorted(ends)
        assert all(a < b <= chain.barrier[a] for a, b in found.intervals)


@SMALL
@given(chains(longest=9, unit=512), st.integers(1, 60), st.integers(2, 9))
def test_what_a_plan_with_segments_in_segments_says_is_so(chain: Chain, units: int, count: int) -> None:
    table, bound = intervals(chain), 512 * units
    among = with_nested(Space(table), cuts(chain, count), 512 * np.arange(1, units + 1))
    flat, found = plan(table, bound), plan(among, bound)
    if found is None:
        assert flat is None
        return
    most, ms = evaluate(chain, found.intervals)
    assert most <= bound
    assert found.ms == pytest.approx(ms)
    assert flat is None or ms <= flat.ms
    assert all(a < b <= chain.barrier[a] for a, b in found.intervals)
    assert [pair for _, pair in found.numbered()] == list(found.intervals)


def test_segments_in_segments_reach_where_segments_alone_do_not() -> None:
    chain = layers(64)
    table = intervals(chain)
    flat = lowest_bound(table, 64 * 512)
    among = with_nested(Space(table), cuts(chain, 24), np.arange(512, flat, 512))
    assert lowest_bound(among, flat) <= 0.75 * flat


@SMALL
@given(chains(), st.integers(1, 100), st.sampled_from([10, 200]))
def test_lowest_bound(chain: Chain, upper: int, parts: int) -> None:
    table = intervals(chain)
    found = lowest_bound(table, upper, parts)
    true = min(most for most, _ in (evaluate(chain, chosen) for chosen in all_plans(chain)))
    assert found <= upper
    if true > upper:
        assert found == upper
    else:
        assert plan(table, found) is not None
        assert found - max(upper // parts, 1) <= true <= found


def layers(n: int, size: int = 512) -> Chain:
    """A plain stack: each node keeps its output, which the next one reads."""
    storages = tuple(Held(size, i, (min(i + 1, n),), i) for i in range(n))
    return chain_of(np.ones(n), np.ones(n) > 0, storages, size)


def chain_of(ms: NDArray[np.float64], saves: NDArray[np.bool_], storages: tuple[Held, ...], size: int) -> Chain:
    """A chain whose nodes may all run again and need ``size`` bytes to work."""
    sizes, barrier = np.full(len(ms), size, dtype=np.int64), np.full(len(ms), len(ms), dtype=np.int64)
    return Chain(ms, ms, saves, barrier, sizes, sizes, sizes, storages, 0.1)


LAYERS = layers(40)
TABLES: dict[int, dict[str, Any]] = {}


def test_no_nodes() -> None:
    chain = layers(0)
    assert plan(intervals(chain), 10) == Plan()
    assert fit(chain, 5, 10, 3, lambda candidate: 10) == Fitted(Plan(), 10, False)


def test_600_nodes_take_seconds() -> None:
    chain = layers(600)
    start = time.monotonic()
    table = intervals(chain)
    found = plan(table, 600 * 512 // 8)
    assert found is not None
    assert found.intervals
    assert time.monotonic() - start < 10


def test_views_are_no_place_for_a_segment_to_begin_and_nothing_is_lost_by_that() -> None:
    n, size = 12, 512
    views = np.arange(n) % 3 == 2  # every third node makes nothing and costs nothing
    makers = np.flatnonzero(~views)
    following = dict(zip(makers, [*makers[1:], n], strict=True))
    storages = tuple(Held(size, i, (following[i],), i) for i in makers.tolist())
    ms = np.where(views, 0.0, 1.0)
    chain = chain_of(ms, ~views, storages, size)
    coarse = coarsen(chain)
    assert coarse.starts.tolist() == [*makers, n]
    for bound in range(2 * size, 12 * size, size):
        fine, found = plan(intervals(chain), bound), plan(intervals(coarse.chain), bound)
        assert (fine is None) == (found is None)
        if fine is not None and found is not None:
            assert found.ms == fine.ms
            assert evaluate(chain, coarse.expand(found).intervals) == (evaluate(chain, fine.intervals)[0], fine.ms)


@SMALL
@given(chains(longest=12), st.integers(1, 6), st.integers(0, 60))
def test_intervals_of_a_shortened_chain_are_legal_in_the_long_one(chain: Chain, longest: int, bound: int) -> None:
    coarse = coarsen(chain, longest)
    assert coarse.starts[0] == 0
    assert coarse.starts[-1] == len(chain)
    assert coarse.chain.ms.sum() == pytest.approx(chain.ms.sum())
    found = plan(intervals(coarse.chain), bound)
    if found is not None:
        for a, b in coarse.expand(found).intervals:
            assert a < b <= chain.barrier[a]


def fit(chain: Chain, budget: int, kept: int, fixed: int, simulate: Simulate) -> Fitted:
    """What a new search finds; tables, which depend on the chain and on ``kept - fixed``, are made once for LAYERS."""
    search = Search(chain, kept, fixed, simulate)
    if chain is not LAYERS:
        return search.fit(budget)
    tables = TABLES.setdefault(kept - fixed, {})
    vars(search).update(tables)
    found = search.fit(budget)
    tables.update({name: value for name, value in vars(search).items() if name in ("coarse", "flat", "nested")})
    return found


class Machine:
    """A stand-in for the exact simulator: some function of the estimate; remembers what it was asked."""

    def __init__(self, chain: Chain, real: Callable[[int, int], float]) -> None:
        self.chain, self.real = chain, real
        self.peaks: dict[Plan, int] = {}

    def __call__(self, candidate: Plan) -> int:
        estimate = evaluate(self.chain, candidate.intervals)[0]
        self.peaks[candidate] = max(int(self.real(estimate, len(candidate.intervals))), 1)
        return self.peaks[candidate]


REAL: dict[str, Callable[[int, int], float]] = {
    "as estimated": lambda estimate, segments: estimate,
    "less": lambda estimate, segments: 0.6 * estimate,
    "far more": lambda estimate, segments: 3 * estimate + 900,
    "offset": lambda estimate, segments: estimate + 7000,
    "square root": lambda estimate, segments: 90 * estimate**0.5,
    "square": lambda estimate, segments: estimate**2 / 4000,
    "waves": lambda estimate, segments: estimate * (1 + 0.4 * np.sin(estimate / 1500)),
    "each segment costs": lambda estimate, segments: estimate + 400 * segments,
    "no effect at all": lambda estimate, segments: 20000,
    "upside down": lambda estimate, segments: 30000 - estimate,
}


@pytest.mark.parametrize("share", [0.02, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99, 1.0, 1.5])
@pytest.mark.parametrize("real", REAL.values(), ids=REAL)
def test_fit_tells_the_truth_and_finds_what_it_saw(real: Callable[[int, int], float], share: float) -> None:
    chain = LAYERS
    machine = Machine(chain, real)
    kept = machine(Plan())
    budget = int(share * kept)
    fitted = fit(chain, budget, kept, 0, machine)
    assert fitted.peak == machine.peaks[fitted.plan]
    assert fitted.fits == (fitted.peak <= budget)
    fitting = [candidate for candidate, peak in machine.peaks.items() if peak <= budget]
    assert fitted.fits == bool(fitting)
    if fitting:
        assert fitted.plan.ms == min(candidate.ms for candidate in fitting)
    assert len(machine.peaks) <= 16


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6])
@pytest.mark.parametrize("real", REAL.values(), ids=REAL)
def test_the_lowest_peak_told_is_reached_when_asked_for(real: Callable[[int, int], float], share: float) -> None:
    chain = LAYERS
    machine = Machine(chain, real)
    kept = machine(Plan())
    told = fit(chain, int(share * kept), kept, 0, machine)
    if not told.fits:
        assert fit(chain, told.peak, kept, 0, machine).fits


@pytest.mark.parametrize("budget", [9000, 12000, 14000])
def test_a_peak_that_only_one_plan_has_is_told_only_if_it_is_found_again(budget: int) -> None:
    chain = LAYERS
    everywhere = Machine(chain, lambda estimate, segments: 20000)
    fit(chain, budget, 20000, 0, everywhere)
    assert len(everywhere.peaks) > 3
    for lucky in everywhere.peaks:
        peaks = {lucky: 15000}
        told = fit(chain, budget, 20000, 0, lambda plan, peaks=peaks: peaks.get(plan, 20000))  # type: ignore[misc]
        assert fit(chain, told.peak, 20000, 0, lambda plan, peaks=peaks: peaks.get(plan, 20000)).fits  # type: ignore[misc]


def test_where_the_estimate_has_no_plan_the_search_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = LAYERS
    machine = Machine(chain, lambda estimate, segments: 0.8 * estimate)
    kept = machine(Plan())
    real = plan
    monkeypatch.setattr(refine, "plan", lambda among, bound: real(among, bound) if bound >= 0.625 * kept else None)
    assert fit(chain, int(0.53 * kept), kept, 0, machine).fits


@settings(max_examples=40, deadline=None, derandomize=True)
@given(chains(longest=10, unit=512), st.floats(0.01, 1.1), st.integers(0, 4000), st.randoms(use_true_random=False))
def test_fit_on_any_chain(chain: Chain, share: float, fixed: int, random: "np.random.Generator") -> None:
    noise: dict[int, float] = {}
    machine = Machine(chain, lambda e, k: fixed + e * noise.setdefault(e, random.uniform(0.5, 1.5)))
    kept = machine(Plan())
    budget = max(int(share * kept), 1)
    fitted = fit(chain, budget, kept, fixed, machine)
    assert fitted.peak == machine.peaks[fitted.plan]
    assert fitted.fits == (fitted.peak <= budget) == any(peak <= budget for peak in machine.peaks.values())
    if not fitted.fits:
        assert fit(chain, fitted.peak, kept, fixed, machine).fits


@pytest.mark.parametrize("share", [0.4, 0.55, 0.75, 0.9])
def test_a_budget_is_used_up_to_a_few_percent(share: float) -> None:
    chain = layers(200)
    machine = Machine(chain, lambda estimate, segments: 1.3 * estimate + 5000)
    kept = machine(Plan())
    fitted = fit(chain, int(share * kept), kept, 5000, machine)
    assert fitted.fits
    cheapest = min((c.ms for c, peak in machine.peaks.items() if peak <= share * kept), default=np.inf)
    assert fitted.plan.ms == cheapest
    assert fitted.peak >= 0.9 * share * kept


def test_a_plan_that_counts_what_goes_by_once_is_taken_where_it_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = LAYERS
    often = tuple(Held(s.bytes, s.producer, tuple(range(s.producer + 1, 40)) or s.uses, None) for s in chain.storages)
    search = Search(replace(chain, storages=(*chain.storages, *often[:20])), 50_000, 0, lambda candidate: 9_000)
    budget = 20_000
    alone = search._fit(budget)
    assert alone.fits
    (cautious,) = search.others
    cheaper = cautious._fit(budget)
    monkeypatch.setattr(search, "_fit", lambda *asked: replace(alone, plan=replace(alone.plan, ms=1e9)))
    assert search.fit(budget) == cheaper
    monkeypatch.setattr(search, "_fit", lambda *asked: replace(alone, plan=replace(alone.plan, ms=0.0)))
    monkeypatch.setattr(cautious, "_fit", lambda *asked: pytest.fail("nothing was promised"))
    assert search.fit(budget).plan.ms == 0.0


def test_where_nothing_fits_more_hopeful_estimates_are_asked_as_long_as_hope_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = LAYERS
    chain = replace(chain, work=chain.work + 4000)
    machine = Machine(chain, lambda estimate, segments: estimate)
    search = Search(chain, machine(Plan()), 0, machine)
    lowest = search.fit(1)
    assert not lowest.fits
    assert lowest.peak == min(machine.peaks.values())
    assert search.hopeful[1].lowest < search.hopeful[0].lowest < search.lowest
    found = replace(lowest, peak=lowest.peak // 2)
    monkeypatch.setattr(search.hopeful[1], "_fit", lambda *asked: found)
    assert search.fit(1) == found
    monkeypatch.setattr(search.hopeful[0], "_fit", lambda *asked: replace(lowest, peak=search.kept))
    assert search.fit(1).peak >= lowest.peak


def test_no_more_hopeful_estimate_is_asked_where_no_plan_could_take_less() -> None:
    machine = Machine(layers(40), lambda estimate, segments: max(estimate, 9000))
    search = Search(machine.chain, machine(Plan()), 0, machine, least=9000)
    assert search.fit(1).peak == 9000
    assert "hopeful" not in vars(search)


def test_where_no_plan_takes_less_than_the_lowest_bound_gives_the_cheapest_alike_is_found_by_halves() -> None:
    machine = Machine(layers(40), lambda estimate, segments: max(estimate, 9000))
    search = Search(machine.chain, machine(Plan()), 0, machine, least=9000)
    found = search.fit(1)
    other = Search(machine.chain, search.kept, 0, machine)
    assert found == other._fit(1)
    assert found.peak == 9000
    looked_at = [{bound for bound in each._plans if bound >= each.lowest} for each in (search, other)]
    assert len(looked_at[0]) < len(looked_at[1])
    assert looked_at[0] < looked_at[1]


def test_plans_made_beside_this_process_are_those_made_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_threads", lambda: ThreadPoolExecutor(1))
    chain = layers(refine._LONG)
    chain = replace(chain, work=chain.work + 4000)
    machine = Machine(chain, lambda estimate, segments: estimate)
    found, counted = [], mock.Mock(wraps=with_nested)
    monkeypatch.setattr(refine, "with_nested", counted)
    for apart in (True, False):
        if not apart:
            monkeypatch.setattr(refine, "Beside", lambda *job: mock.Mock(result=lambda: None))
        search = Search(chain, machine(Plan()), 0, machine, least=1)
        found.append(search.fit(0))
        assert counted.call_count == 1 if apart else counted.call_count > 2
    assert found[0] == found[1]


def test_what_other_ways_to_count_promise_is_asked_of_a_process_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each budget anew, and with the same result."""
    monkeypatch.setattr(beside, "_threads", lambda: ThreadPoolExecutor(1))
    chain = layers(refine._LONG)
    often = tuple(
        Held(s.bytes, s.producer, tuple(range(s.producer + 1, refine._LONG)), None) for s in chain.storages[:3]
    )
    chain = replace(chain, storages=(*chain.storages, *often))
    machine = Machine(chain, lambda estimate, segments: estimate)
    kept, counted = machine(Plan()), mock.Mock(wraps=refine._cheapest_ms)
    monkeypatch.setattr(refine, "_cheapest_ms", counted)
    found = []
    for apart in (True, False):
        if not apart:
            monkeypatch.setattr(refine, "Beside", lambda *job: mock.Mock(result=lambda: None))
        search = Search(chain, kept, 0, machine)
        assert len(search.others) == 1
        found.append([search.fit(int(share * kept)) for share in (0.8, 0.5)])
        assert counted.call_count == (0 if apart else 2)
    assert found[0] == found[1]
    assert all(each.fits and each.plan.ms for each in found[0])


def test_a_way_to_count_whose_first_plan_is_far_above_another_is_given_up() -> None:
    machine = Machine(LAYERS, lambda estimate, segments: estimate)
    search = Search(LAYERS, machine(Plan()), 0, machine)
    lowest = search._fit(1)
    again = Search(LAYERS, search.kept, 0, machine)
    before = len(machine.peaks)
    again._fit(1, known=0.9 * lowest.peak)
    assert list(again.peaks) == [again._plans[again.lowest]]
    assert len(machine.peaks) == before
    again = Search(LAYERS, search.kept, 0, machine)
    assert again._fit(1, known=lowest.peak) == lowest


def test_no_tables_are_made_of_a_way_to_count_that_is_far_without_segments_in_segments() -> None:
    often = tuple(Held(s.bytes, s.producer, tuple(range(s.producer + 1, 40)) or s.uses, None) for s in LAYERS.storages)
    search = Search(replace(LAYERS, storages=(*LAYERS.storages, *often)), 90_000, 0, lambda candidate: 9_000)
    (cautious,) = search.others
    assert cautious._is_far(int(lowest_bound(cautious.flat.table, 90_000) / 1.5))
    assert not cautious._is_far(int(lowest_bound(cautious.flat.table, 90_000) / 1.3))
    assert search.fit(1).peak == 9_000
    far = cautious._is_far(9_000)
    assert ("nested" in vars(cautious)) == (not far)


@pytest.mark.parametrize("hidden", [0, 40_000])
def test_a_way_to_count_that_promises_no_less_is_not_looked_at(hidden: int) -> None:
    """It is where plans take more than the first way to count promised."""
    often = tuple(Held(s.bytes, s.producer, tuple(range(s.producer + 1, 40)) or s.uses, None) for s in LAYERS.storages)
    chain = replace(LAYERS, storages=(*LAYERS.storages, *often))
    machine = Machine(chain, lambda estimate, segments: estimate + hidden * bool(segments))
    search = Search(chain, 90_000, 0, machine)
    found = search.fit(1)
    (cautious,) = search.others
    looked = cautious.promised < (1 - ALIKE) * found.peak
    assert looked == bool(hidden)
    assert bool(cautious._plans) == looked


def test_what_costs_as_much_as_the_best_that_fits_is_not_simulated() -> None:
    search = Search(LAYERS, 90_000, 0, lambda plan: pytest.fail("simulated"))
    search.best = best = Fitted(Plan(((0, 4),), 4.1), 7_000, fits=True)
    search._plans[8_000] = Plan(((4, 8),), 4.1)
    assert search._look(8_000, 9_000) == best.peak
    assert search.best is best


def test_no_other_estimate_is_asked_where_the_lowest_peak_is_hopeless() -> None:
    chain = replace(LAYERS, work=LAYERS.work + 4000)
    machine = Machine(chain, lambda estimate, segments: estimate)
    search = Search(chain, machine(Plan()), 0, machine)
    own = search.fit(1, hopeless=search.chain.of_one_node)
    assert not {"hopeful", "others"} & vars(search).keys()
    assert search.fit(1, hopeless=own.peak).peak <= own.peak
    assert {"hopeful", "others"} <= vars(search).keys()


def test_nothing_is_planned_where_one_node_alone_is_hopeless() -> None:
    search = Search(LAYERS, 50_000, 700, lambda plan: pytest.fail("simulated"))
    assert search.chain.of_one_node == 1024
    assert search.fit(1, hopeless=700 + 1023) == Fitted(Plan(), 50_000, fits=False)
    assert not {"lowest", "flat"} & vars(search).keys()
    assert search.fit(50_000, hopeless=0).fits


@SMALL
@given(chains())
def test_no_plan_takes_less_than_one_node_does(chain: Chain) -> None:
    read = tuple(replace(s, saver=s.saver and min(max(s.saver, s.first_use), len(chain) - 1)) for s in chain.storages)
    read = tuple(s for s in read if s.saver is None or s.producer == s.saver or s.first_use <= s.saver)
    chain = replace(chain, storages=read)
    assert chain.of_one_node <= min(evaluate(chain, chosen)[0] for chosen in all_plans(chain))


@pytest.mark.parametrize("budget", [1, 8999])
def test_nothing_is_simulated_where_no_plan_could_take_less_than_none(budget: int) -> None:
    search = Search(layers(40), 9000, 0, lambda candidate: pytest.fail("simulated"), least=9000)
    assert search.fit(budget) == Fitted(Plan(), 9000, fits=False)


def test_below_the_least_that_any_plan_takes_only_the_lowest_is_looked_for() -> None:
    machine = Machine(layers(40), lambda estimate, segments: max(estimate, 9000))
    search = Search(machine.chain, machine(Plan()), 0, machine, least=9000)
    lowest = search.fit(1)
    looked = len(machine.peaks)
    assert search.fit(8999) == lowest
    assert len(machine.peaks) == looked
