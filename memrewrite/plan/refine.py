"""From a budget to a plan whose simulated peak fits it: plan on estimates, simulate exactly, correct, repeat."""

from collections.abc import Callable
from dataclasses import dataclass

from memrewrite.plan.dp import Intervals, intervals, lowest_bound, plan
from memrewrite.plan.segments import Chain, Plan

Simulate = Callable[[Plan], int]
_ROUNDS = 7
_SLACK = 0.01  # a plan that leaves less than this share of the budget unused is good enough


@dataclass(frozen=True)
class Fitted:
    """A plan and its exactly simulated peak in bytes; ``fits`` says whether that is within the budget asked for."""

    plan: Plan
    peak: int
    fits: bool


def fit(chain: Chain, budget: int, kept: int, fixed: int, simulate: Simulate) -> Fitted:
    """The cheapest plan found whose simulated peak is at most ``budget`` bytes; else the one of the lowest peak.

    ``kept`` is the simulated peak in bytes without any segment, ``fixed`` the bytes that no plan can move (parameters,
    optimizer state, inputs, workspaces). The planner's bound is moved by what the simulation shows until it fits.
    """
    best = Fitted(Plan(), kept, kept <= budget)
    if best.fits:
        return best
    table = intervals(chain)
    high, low = float(kept - fixed), 0.0  # bounds known to be too loose, and to fit or to be infeasible
    bound = float(budget - fixed)
    tried: dict[Plan, int] = {}
    for _ in range(_ROUNDS):
        found = plan(chain, table, int(bound)) if bound > 0 else None
        if found is None:
            low = max(low, bound)
            bound = (low + high) / 2
            if high - low < _SLACK * budget:
                break
            continue
        if found not in tried:
            tried[found] = simulate(found)
        peak = tried[found]
        candidate = Fitted(found, peak, peak <= budget)
        best = min(best, candidate, key=_rank)
        if candidate.fits:
            if budget - peak <= _SLACK * budget:
                break
            low = max(low, bound)
            bound = min(bound + (budget - peak), (bound + high) / 2)
        else:
            high = min(high, bound)
            bound = max(bound - (peak - budget), (low + bound) / 2)
        if high - low < _SLACK * _SLACK * budget:
            break
    return best if best.fits else min(best, lowest(chain, table, kept, fixed, simulate), key=lambda f: f.peak)


def lowest(chain: Chain, table: Intervals, kept: int, fixed: int, simulate: Simulate) -> Fitted:
    """The plan of the lowest simulated peak among those around the lowest bound the planner can meet."""
    best = Fitted(Plan(), kept, False)
    start = lowest_bound(chain, table, max(kept - fixed, 1))
    for factor in (1.0, 1.03, 1.07, 1.12, 1.2, 1.35):
        found = plan(chain, table, int(start * factor))
        if found is not None and found != best.plan:
            best = min(best, Fitted(found, simulate(found), False), key=lambda f: f.peak)
    return best


def _rank(fitted: Fitted) -> tuple[bool, float]:
    return (not fitted.fits, fitted.plan.ms if fitted.fits else fitted.peak)
