"""The cheapest plan as an integer program, solved exactly: what the planner is held against.

    python -m tests.support.milp [--graphs 60]      # a table for tests/benchmarks/RESULTS.md

The program, in words. An *arc* from position a to position b stands for the nodes a to b - 1: one kept node, or an
interval that is legal (it ends at ``barrier[a]`` or before). Each arc has a binary that says whether the plan takes it.

1. The arcs taken are a way from position 0 to position n: one leaves 0, one enters n, and at every other position as
   many enter as leave. So each node lies on exactly one of them.
2. What is held at a position is what is held one position before, and what the arcs add that end here (a continuous
   variable for each position, 0 at the beginning).
3. For each node: what is held there, and what the arc that the node lies on needs beyond that, is within the bound.
   Just one arc over a node is taken, and no other that begins before the node ends after it; so the binaries of
   all arcs over the node stand in one row, each with its own need, and no big constant is called for.
4. An arc needs what its backward and its forward need and what it adds, whichever is more.
5. The milliseconds of the arcs taken, summed up, are least; kept nodes cost nothing.

What an arc adds, needs and costs is written down in ``test_plan.interval_facts`` and ``kept_facts``, without the
tables that the planner uses. Bytes are counted in their greatest common divisor: nothing is rounded and there are no
slots. The solver works in floating point, so its plan is evaluated once more and must be within the bound.
"""

import argparse
import functools
import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from memrewrite.plan.coarse import cuts
from memrewrite.plan.dp import flat, lowest_bound, plan, with_nested
from memrewrite.plan.segments import Chain, Plan
from memrewrite.plan.tables import Intervals
from tests.plan.test_plan import evaluate, interval_facts, kept_facts
from tests.support.random_chains import KINDS, random_chain

GRAPHS = 60
WITHIN = 1.01  # of the optimum
_SHARES = (0.0, 0.02, 0.3)  # of the way from the lowest peak to that of everything kept
_CUTS, _LEVELS = 12, 6
_OPTIMAL, _INFEASIBLE = 0, 2  # scipy's words for how it ended


@dataclass(frozen=True)
class Program:
    """All arcs of a chain: their nodes [start, end), what they add and need, in units of ``unit`` bytes, and ms."""

    chain: Chain
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    interval: NDArray[np.bool_]
    adds: NDArray[np.int64]
    needs: NDArray[np.int64]
    ms: NDArray[np.float64]
    unit: int

    @classmethod
    def of(cls, chain: Chain) -> "Program":
        arcs = []
        for i in range(len(chain)):
            adds, work = kept_facts(chain, i)
            arcs.append((i, i + 1, False, adds, adds + max(work, 0), 0.0))
            for b in range(i + 1, int(chain.barrier[i]) + 1):
                adds, _, peak, ms = interval_facts(chain, i, b)
                arcs.append((i, b, True, adds, max(peak, adds), ms))
        start, end, interval, adds_, needs, ms_ = (np.array(column) for column in zip(*arcs, strict=True))
        unit = math.gcd(*adds_.tolist(), *needs.tolist()) or 1
        return cls(chain, start, end, interval, adds_ // unit, needs // unit, ms_.astype(np.float64), unit)

    def optimum(self, bound: int) -> Plan | None:
        """The cheapest of all plans of disjoint intervals whose estimated peak is within ``bound`` bytes."""
        units = bound // self.unit
        n, arcs = len(self.chain), len(self.start)
        fits = self.needs <= units
        variables = Bounds(np.zeros(arcs + n), np.append(fits.astype(float), np.full(n, float(units))))
        within = LinearConstraint(self._used(), -np.inf, float(units))
        x = self._solve(np.append(self.ms, np.zeros(n)), variables, [within, *self._ways(0)])
        return None if x is None else self._plan(x, bound)

    def lowest(self) -> int:
        """The lowest bound in bytes for which there is a plan."""
        n, arcs = len(self.chain), len(self.start)
        upper = np.concatenate([np.ones(arcs), np.full(n + 1, np.inf)])
        used = csr_array(coo_array(np.hstack([self._used().toarray(), -np.ones((n, 1))])))
        cost = np.append(np.zeros(arcs + n), 1.0)
        x = self._solve(
            cost, Bounds(np.zeros(arcs + n + 1), upper), [LinearConstraint(used, -np.inf, 0), *self._ways(1)]
        )
        if x is None:
            raise AssertionError("a chain has always some plan")
        return evaluate(self.chain, self._plan(x, None).intervals)[0]

    def _ways(self, extra: int) -> list[LinearConstraint]:
        """Sentences 1 and 2; ``extra`` further variables take no part in them."""
        n, arcs = len(self.chain), len(self.start)
        each, ones = np.arange(arcs), np.ones(arcs)
        flow = _sparse([(self.start, each, ones), (self.end, each, -ones)], n + 1, arcs + n + extra)
        ends = np.zeros(n + 1)
        ends[0], ends[n] = 1, -1
        inside, position = self.end < n, np.arange(1, n)  # what is held at n is nobody's concern: sentence 4
        held = _sparse(
            [
                (self.end[inside], each[inside], -self.adds[inside].astype(float)),
                (position, arcs + position, np.ones(n - 1)),
                (position, arcs + position - 1, -np.ones(n - 1)),
                (np.zeros(1, np.int64), np.array([arcs]), np.ones(1)),
            ],
            n,
            arcs + n + extra,
        )
        return [LinearConstraint(flow, ends, ends), LinearConstraint(held, 0, 0)]

    def _used(self) -> csr_array:
        """Sentence 3, a row for each node: what is held there and what the arc over it needs."""
        n, arcs = len(self.chain), len(self.start)
        length = self.end - self.start
        column = np.repeat(np.arange(arcs), length)
        row = np.concatenate([np.arange(a, b) for a, b in zip(self.start, self.end, strict=True)])
        node = np.arange(n)
        entries = [(row, column, self.needs[column].astype(float)), (node, arcs + node, np.ones(n))]
        return _sparse(entries, n, arcs + n)

    def _solve(
        self, cost: NDArray[np.float64], bounds: Bounds, constraints: list[LinearConstraint]
    ) -> NDArray[np.float64] | None:
        integral = np.zeros(len(cost))
        integral[: len(self.start)] = 1
        found = milp(cost, integrality=integral, bounds=bounds, constraints=constraints, options={"mip_rel_gap": 0.0})
        if found.status == _INFEASIBLE:
            return None
        if found.status != _OPTIMAL:
            raise AssertionError(f"the solver gave up: {found.message}")
        return np.asarray(found.x, dtype=np.float64)

    def _plan(self, x: NDArray[np.float64], bound: int | None) -> Plan:
        taken = (x[: len(self.start)] > 0.5) & self.interval
        chosen = sorted((int(a), int(b)) for a, b in zip(self.start[taken], self.end[taken], strict=True))
        peak, ms = evaluate(self.chain, tuple(chosen))
        if bound is not None and peak > bound:
            raise AssertionError(f"the solver's plan takes {peak} bytes, not {bound}")
        return Plan(tuple(chosen), ms)


def _sparse(
    entries: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]], rows: int, columns: int
) -> csr_array:
    row, column, value = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return csr_array(coo_array((value, (row, column)), shape=(rows, columns)))


def optimum(chain: Chain, bound: int) -> Plan | None:
    """The cheapest plan of disjoint intervals within ``bound`` bytes, None when there is none."""
    return Program.of(chain).optimum(bound)


@dataclass(frozen=True)
class Case:
    """The planner and the optimum for one random graph under one bound; ms are those of recomputation."""

    seed: int
    kind: str
    nodes: int
    share: float
    bound: int
    optimum: Plan
    flat: Plan | None
    nested: Plan | None

    @property
    def ratio(self) -> float:
        """What the flat plan costs for each ms of the optimum."""
        return _ratio(self.flat, self.optimum)

    @property
    def nested_ratio(self) -> float:
        """The same of the plan with segments in segments; it may be below 1."""
        return _ratio(self.nested, self.optimum)

    def __str__(self) -> str:
        flat, deep = (f"{found.ms:.4f} ms" if found else "none" for found in (self.flat, self.nested))
        return (
            f"seed {self.seed} ({self.kind}), {self.nodes} nodes, bound {self.bound}: "
            f"optimum {self.optimum.ms:.4f} ms, plan {flat}, ratio {self.ratio:.5f}; "
            f"with segments in segments {deep}, ratio {self.nested_ratio:.5f}"
        )


def _ratio(found: Plan | None, best: Plan) -> float:
    if found is None:
        return math.inf
    return found.ms / best.ms if best.ms else 1.0 + found.ms


@dataclass(frozen=True)
class Graph:
    """A random graph, its tables, the lowest bound in bytes for which it has a plan, and a case for each bound."""

    chain: Chain
    table: Intervals
    lowest: int
    cases: tuple[Case, ...]


@functools.cache
def graph(seed: int) -> Graph:
    """The random graph of a seed, planned and solved."""
    kind, chain = random_chain(seed)
    among, program = flat(chain), Program.of(chain)
    low, kept = program.lowest(), evaluate(chain, ())[0]
    lowest = lowest_bound(among.table, max(kept, 1))
    deep = with_nested(among, cuts(chain, _CUTS), np.geomspace(lowest / 8, lowest, _LEVELS).astype(np.int64))
    found = []
    for share in _SHARES if kept > low else _SHARES[:1]:
        bound = low + int(share * (kept - low))
        best = program.optimum(bound)
        if best is None:
            raise AssertionError(f"seed {seed}: no plan within {bound} bytes, and the lowest peak is {low}")
        found.append(Case(seed, kind, len(chain), share, bound, best, plan(among.table, bound), plan(deep, bound)))
    return Graph(chain, among.table, low, tuple(found))


def summary(found: list[Case]) -> tuple[float, float]:
    """(worst, median) ratio of the flat plans, infinite where there is none."""
    ratios = [case.ratio for case in found]
    return max(ratios), statistics.median(ratios)


def _table(found: list[Case]) -> str:
    lines = [
        "| graph | graphs | nodes | bounds | worst | median | worst with segments in segments | best |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in [*KINDS, "all"]:
        some = [case for case in found if kind in (case.kind, "all")]
        if not some:
            continue
        worst, median = summary(some)
        inner = [case.nested_ratio for case in some]
        nodes = [case.nodes for case in some]
        lines.append(
            f"| {kind} | {len({case.seed for case in some})} | {min(nodes)}-{max(nodes)} | {len(some)} "
            f"| {worst:.4f} | {median:.4f} | {max(inner):.4f} | {min(inner):.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print how near the planner comes to the optimum."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--graphs", type=int, default=GRAPHS)
    graphs = parser.parse_args().graphs
    start = time.monotonic()
    found = [case for seed in range(graphs) for case in graph(seed).cases]
    print(_table(found))
    print(f"\n{len(found)} bounds in {time.monotonic() - start:.0f} s. All that are more than 1 % dearer:")
    for case in found:
        if max(case.ratio, case.nested_ratio) > WITHIN:
            print(f"- {case}")


if __name__ == "__main__":
    main()
