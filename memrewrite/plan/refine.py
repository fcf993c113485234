"""From a budget to a plan whose simulated peak fits it: plan on estimates, simulate exactly, correct, repeat."""

from collections.abc import Callable
from dataclasses import dataclass

from memrewrite.plan.coarse import coarsen
from memrewrite.plan.dp import intervals, lowest_bound, plan
from memrewrite.plan.segments import Chain, Plan

Simulate = Callable[[Plan], int]
_ROUNDS = 9
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
    search = _Search(chain, budget, fixed, simulate, best)
    low = (search.lowest, 0)  # (bound, peak) of a plan that fits, peak 0 while none is known
    high = (max(kept - fixed, search.lowest), kept)  # of one that does not
    bound = budget - fixed
    for _ in range(_ROUNDS):
        bound = min(max(bound, search.lowest), high[0])
        peak = search.look(bound)
        if peak is None:  # the estimate allows no plan here, so what fits lies above
            low = (bound, low[1])
            bound = (bound + high[0]) // 2
            continue
        if peak <= budget:
            low = (bound, peak)
            if budget - peak <= _SLACK * budget:
                break
        else:
            high = (bound, peak)
            if bound == search.lowest:
                break
        if high[0] - low[0] <= _SLACK * _SLACK * budget:
            break
        bound = _between(low, high, budget)
    return search.best if search.best.fits else search.explore()


class _Search:
    """What has been tried so far, and the best of it: the cheapest plan that fits, else that of the lowest peak."""

    def __init__(self, chain: Chain, budget: int, fixed: int, simulate: Simulate, best: Fitted) -> None:
        self.coarse, self.budget, self.simulate = coarsen(chain), budget, simulate
        self.kept = self.best = best
        self.table = intervals(self.coarse.chain)
        self.lowest = lowest_bound(self.coarse.chain, self.table, max(best.peak - fixed, 1))
        self._peaks: dict[Plan, int] = {}

    def look(self, bound: int) -> int | None:
        """The exact peak of the cheapest plan under a bound on the estimate; None where there is no plan."""
        cheapest = plan(self.coarse.chain, self.table, bound)
        if cheapest is None:
            return None
        found = self.coarse.expand(cheapest)
        if found not in self._peaks:
            self._peaks[found] = self.simulate(found)
        peak = self._peaks[found]
        self.best = min(self.best, Fitted(found, peak, peak <= self.budget), key=_rank)
        return peak

    def explore(self) -> Fitted:
        """Look around the lowest bound, where the estimate and the exact peak need not have their minima together.

        What was tried before is forgotten, so that the lowest peak does not depend on the budget and is found again
        when it is asked for.
        """
        self.best = self.kept
        for factor in (1.0, 1.03, 1.07, 1.12, 1.2, 1.35):
            self.look(int(self.lowest * factor))
        return self.best


def _between(low: tuple[int, int], high: tuple[int, int], budget: int) -> int:
    """The next bound to try: where a straight line through what is known meets the budget, kept off both ends."""
    width = high[0] - low[0]
    if not low[1]:
        return int(high[0] - max(high[1] - budget, 0.05 * width))
    share = (budget * (1 - _SLACK / 2) - low[1]) / max(high[1] - low[1], 1)
    return int(low[0] + width * min(max(share, 0.1), 0.9))


def _rank(fitted: Fitted) -> tuple[bool, float]:
    return (not fitted.fits, fitted.plan.ms if fitted.fits else fitted.peak)
