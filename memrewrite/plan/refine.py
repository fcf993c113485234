"""From a budget to a plan whose simulated peak fits it: plan on estimates, simulate exactly, correct, repeat."""

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from memrewrite.plan.coarse import Coarse, coarsen, cuts
from memrewrite.plan.dp import flat, lowest_bound, plan, possible, with_nested
from memrewrite.plan.segments import Chain, Plan
from memrewrite.plan.tables import Space
from memrewrite.process.beside import Beside

Simulate = Callable[[Plan], int]
LowestPlans = tuple[int, dict[int, Plan | None]]
_ROUNDS = 9
_CUTS = 24  # between which segments may hold segments
_LEVELS = 12  # bounds they are planned for
# Segments in segments do not pay where there is this much more room than the lowest plan without them needs: the plans
# of eight models, from ResNet-50 to GPT-2, cost the same to the last digit.
_ROOMY = 1.25
ALIKE = 0.005  # the share by which the lowest peaks may differ: GPT-2's last 0.2 % cost half the recomputation again
_RISEN = 0.01  # a peak so much above the lowest one seen is beyond the minimum, in the plans of ten models
# A peak so many times the lowest one known is far from it: other ways to count, and looser bounds than the lowest, led
# to peaks up to 5 % lower than the first, in the plans of ten models.
FAR = 1.06
_FLAT = 1.4  # the same of an estimate without segments in segments, which with them was 0.77 of that or more
_AROUND = (1.0, 1.03, 1.07, 1.12, 1.2, 1.35)  # the lowest bound, by which it may be missed
_LONG = 200  # chains of so many nodes take a second to tabulate, others less than to start a process
# The lowest bound is sought to one of so many parts of what a plan may move: the lowest peaks of Qwen3 and LoRA, which
# move four times what is left, fell by 0.5 % so, ResNet-50's by 1 %. What hopes is no more exact than 0.5 %.
_FINE, _COARSE = 2000, 200
_HOPES = (0.9, 0.8)  # ViT-B's lowest peak falls by 3 % so, EfficientNet-B4's by 2 %, Swin-T's and ConvNeXt-T's by 1 %
_SLACK = 0.01  # a plan that leaves less than this share of the bytes it may move unused is good enough,
_MORE = 2  # and one that leaves less than this share of the whole budget so, if this many more looks find no better one


@dataclass(frozen=True)
class Fitted:
    """A plan and its exactly simulated peak in bytes; ``fits`` says whether that is within the budget asked for."""

    plan: Plan
    peak: int
    fits: bool


class Search:
    """What is known about the plans for a chain, from one budget to the next.

    ``kept`` is the simulated peak in bytes without any segment, ``fixed`` the bytes that no plan can move (parameters,
    optimizer state, inputs, workspaces), ``simulate`` gives the exact peak of a plan, which is ``least`` or more.
    ``parts`` is as in ``lowest_bound``.
    """

    def __init__(
        self, chain: Chain, kept: int, fixed: int, simulate: Simulate, least: int = 0, parts: int = _FINE
    ) -> None:
        self.chain, self.kept, self.fixed, self.simulate, self.least = chain, kept, fixed, simulate, least
        self.parts = parts
        self.peaks: dict[Plan, int] = {}
        self._plans: dict[int, Plan | None] = {}
        self._beside: Beside[LowestPlans] | None = None
        self._likely: Beside[float] | None = None

    def fit(self, budget: int, hopeless: float = math.inf) -> Fitted:
        """The cheapest plan found whose simulated peak is at most ``budget`` bytes; else that of the lowest, to 0.5 %.

        Where none is found, or a cheaper one may be, ``others`` are asked too, and last those that are ``hopeful``, as
        long as hope helps; none where the lowest peak of its own is more than ``hopeless`` bytes. Where one node alone
        takes more than these, nothing is planned, and the model is left without segments.
        """
        if budget < self.kept and min(self.kept, self.fixed + self.chain.of_one_node) > hopeless:
            return Fitted(Plan(), self.kept, False)
        with self._others_beside(budget, hopeless):
            found = self._fit(budget)
            return found if not found.fits and found.peak > hopeless else self._or_by_others(found, budget)

    def _or_by_others(self, found: Fitted, budget: int) -> Fitted:
        """What was ``found``, or what other ways to count lead to, where that is better."""
        for other in self.others:
            hoped = self._may_fall(found, budget) and other._may_reach_less(found.peak)
            if hoped or other._promises(budget, found.plan.ms):
                found = min(found, other._fit(budget, found.peak), key=_rank)
        for other in self.hopeful if self._may_fall(found, budget) else ():
            hoping = other._fit(budget, found.peak)
            helped = hoping.peak <= found.peak
            found = min(found, hoping, key=_rank)
            if not helped:
                break
        return found

    @contextlib.contextmanager
    def _others_beside(self, budget: int, hopeless: float) -> Iterator[None]:
        """Meanwhile other processes make, by the other ways to count, what may well be asked for.

        Their lowest plans where no plan fits, and they are asked wherever they may help; else what fits may cost.
        """
        helps = len(self.chain.work) >= _LONG and budget < self.kept
        sure = helps and budget < self.least and hopeless == math.inf
        with contextlib.ExitStack() as stack:
            for other in (*self.others, *self.hopeful) if sure else ():
                other._beside = Beside(lowest_plans, other.chain, other.kept, other.fixed, other.parts)
                stack.callback(other._beside.drop)
            for other in self.others if helps and budget >= self.least else ():
                other._likely = Beside(likely_ms, other.chain, budget - other.fixed)
                stack.callback(other._likely.drop)
                stack.callback(setattr, other, "_likely", None)  # which is of this budget
            yield

    def _may_fall(self, found: Fitted, budget: int) -> bool:
        """Whether it does not fit and a plan of a lower peak is thinkable."""
        return not found.fits and found.peak > self._as_low_as_any(budget)

    def _as_low_as_any(self, budget: int) -> int:
        """The peak in bytes below which none is, or, where no plan can fit, none is that differs."""
        return int((1 + ALIKE) * self.least) if budget < self.least else self.least

    def _may_reach_less(self, peak: int) -> bool:
        """Whether its estimate promises less than a peak by more than what is alike differs."""
        return not self._is_far(peak) and self.promised < (1 - ALIKE) * peak

    def _is_far(self, peak: int) -> bool:
        """Whether even the estimate without segments in segments, which are not tabulated for it, is far above it."""
        return self.fixed + self.lowest_flat > _FLAT * peak

    def _promises(self, budget: int, ms: float) -> bool:
        """Whether, if the estimate were exact, there would be a plan of less than ``ms``.

        Nothing is simulated, and no segments in segments are tried, which take longest to tabulate.
        """
        if not ms:
            return False
        likely = None if self._likely is None else self._likely.result()
        return (_cheapest_ms(self.flat, budget - self.fixed) if likely is None else likely) < ms

    def _fit(self, budget: int, known: float = math.inf) -> Fitted:
        """``fit`` with one way to count, where another led to a ``known`` peak.

        Nothing is simulated where ``least`` tells the outcome.
        """
        self.best = Fitted(Plan(), self.kept, self.kept <= budget)
        if self.best.fits or self.kept <= self.least:  # then no plan takes less
            return self.best
        if budget >= self.least and self._approach(budget).fits:
            return self.best
        return self._explore(budget, known)

    def _approach(self, budget: int) -> Fitted:
        """The bound is moved by what the simulation shows until a plan fits."""
        low = (0, 0)  # (bound, peak) of a plan that fits, 0 while none is known
        high = (self.kept - self.fixed, self.kept)  # of one that does not
        bound = min(budget - self.fixed, high[0])
        slack = _SLACK * max(budget - self.fixed, 0)
        close = 0  # looks since a plan came close to the budget
        for _ in range(_ROUNDS):
            peak = self._look(bound, budget)
            close += self.best.fits and budget - self.best.peak <= _SLACK * budget
            if peak is None:  # the estimate allows no plan here, so what fits lies above
                low = (bound, 0)
                bound = self.lowest if bound < self.lowest else (bound + high[0]) // 2
                continue
            if peak <= budget:
                low = (bound, peak)
                if budget - peak <= slack:
                    break
            else:
                high = (bound, peak)
                if bound == vars(self).get("lowest"):
                    break
            if high[0] - low[0] <= _SLACK * slack or close > _MORE:
                break
            bound = _next(bound, peak, low, high, int(budget - slack / 2))
        return self.best

    @functools.cached_property
    def others(self) -> "list[Search]":
        """Searches that are right where this one may be too hopeful.

        One takes what several nodes use and nobody saves for saved. Two segments that use a storage then count it once,
        but so do kept nodes, which let go of it: right near the lowest peak, where nearly all nodes lie in segments.
        Where segments run again on demand, one keeps nothing in them.
        """
        chains = []
        saved = tuple(s.saved() for s in self.chain.storages)
        if saved != self.chain.storages:
            chains.append(replace(self.chain, storages=saved))
        if self.chain.on_demand and self.chain.save_bytes:
            chains.append(replace(self.chain, save_bytes=()))
        return [self._with(chain) for chain in chains]

    @functools.cached_property
    def hopeful(self) -> "list[Search]":
        """Searches that count less for what is in use besides what is held, whose maxima need not meet."""
        works = [(hope * self.chain.work).astype(np.int64) for hope in _HOPES]
        return [self._with(replace(self.chain, work=work), _COARSE) for work in works]

    def _with(self, chain: Chain, parts: int = _FINE) -> "Search":
        """The search that estimates bytes otherwise, which changes no peak."""
        other = Search(chain, self.kept, self.fixed, self.simulate, self.least, parts)
        other.peaks = self.peaks
        return other

    @property
    def promised(self) -> int:
        """The bytes of the lowest peak by the estimate: those found of 16 models were up to 4 % less and 2 % more."""
        return max(self.least, self.fixed + self.lowest)

    @functools.cached_property
    def coarse(self) -> Coarse:
        """The chain as it is planned."""
        return coarsen(self.chain)

    @functools.cached_property
    def flat(self) -> Space:
        """The plans without segments in segments."""
        return flat(self.coarse.chain)

    @functools.cached_property
    def nested(self) -> Space:
        """All plans."""
        if self.chain.on_demand:
            return self.flat
        levels = np.geomspace(self.lowest_flat / 8, self.lowest_flat, _LEVELS).astype(np.int64)
        return with_nested(self.flat, cuts(self.coarse.chain, _CUTS), levels)

    @functools.cached_property
    def lowest_flat(self) -> int:
        """The lowest bound on the estimate for which there is a plan without segments in segments."""
        return lowest_bound(self.flat.table, max(self.kept - self.fixed, 1), self.parts)

    @functools.cached_property
    def lowest(self) -> int:
        """The lowest bound on the estimate for which there is a plan."""
        if self._beside is not None and (made := self._beside.result()) is not None:
            lowest, plans = made
            self._plans.update(plans)
            return lowest
        return lowest_bound(self.nested, max(self.kept - self.fixed, 1), self.parts)

    def _planned(self, bound: int) -> Plan | None:
        """The cheapest plan under a bound on the estimate; None where there is none."""
        cheapest = plan(self.flat if possible(self.flat, int(bound / _ROOMY)) else self.nested, bound)
        return None if cheapest is None else self.coarse.expand(cheapest)

    def _look(self, bound: int, budget: int) -> int | None:
        """The exact peak of the cheapest plan under a bound on the estimate; None where there is no plan.

        What costs to the last digit what the best that fits does, as with the same segments in another of several equal
        layers, is no better, and cheaper plans lie above it: nothing is simulated, it is taken for that.
        """
        if bound not in self._plans:
            self._plans[bound] = self._planned(bound)
        found = self._plans[bound]
        if found is None:
            return None
        if self.best.fits and found.ms == self.best.plan.ms:
            return self.best.peak
        if found not in self.peaks:
            self.peaks[found] = self.simulate(found)
        peak = self.peaks[found]
        self.best = min(self.best, Fitted(found, peak, peak <= budget), key=_rank)
        return peak

    def _explore(self, budget: int, known: float) -> Fitted:
        """Look around the lowest bound, where the estimate and the exact peak need not have their minima together.

        What was tried before is forgotten, so that the lowest peak does not depend on the budget and is found again
        when it is asked for. Where the lowest bound leads to a peak as low as any, the others are for cheaper plans.
        """
        self.best = Fitted(Plan(), self.kept, self.kept <= budget)
        bounds = [int(self.lowest * factor) for factor in _AROUND]
        as_low = self._as_low_as_any(budget)
        for bound in bounds:
            peak = self._look(bound, budget)
            if peak is None:
                continue
            if bound == bounds[0] and budget < self.least and peak <= as_low:
                bisect.bisect(bounds, as_low, 1, key=lambda looser: self._look(looser, budget) or 0)
                break
            if peak > min((1 + _RISEN) * self.best.peak, FAR * known):
                break
        return self.best


def lowest_plans(chain: Chain, kept: int, fixed: int, parts: int) -> LowestPlans:
    """What a search explores: the lowest bound on the estimate, and the cheapest plans under bounds around it."""
    search = Search(chain, kept, fixed, lambda plan: 0, parts=parts)
    bounds = [int(search.lowest * factor) for factor in _AROUND]
    return search.lowest, {bound: search._planned(bound) for bound in bounds}


def likely_ms(chain: Chain, bound: int) -> float:
    """What a plan without segments in segments costs in ms under a bound on the estimate; infinite where none is."""
    return _cheapest_ms(flat(coarsen(chain).chain), bound)


def _cheapest_ms(among: Space, bound: int) -> float:
    found = plan(among, bound)
    return math.inf if found is None else found.ms


def _next(bound: int, peak: int, low: tuple[int, int], high: tuple[int, int], wanted: int) -> int:
    """The next bound to try: the last one moved by what its peak is off the one wanted, or between what is known."""
    moved = bound + wanted - peak
    if low[0] < moved < high[0]:
        return moved
    width = high[0] - low[0]
    share = (wanted - low[1]) / max(high[1] - low[1], 1) if low[1] else 0.5
    return int(low[0] + width * min(max(share, 0.1), 0.9))


def _rank(fitted: Fitted) -> tuple[bool, int, float]:
    """What fits comes first, then the lower peak; among peaks that are about alike, the cheaper plan."""
    level = 0 if fitted.fits else int(math.log(max(fitted.peak, 1)) / math.log1p(ALIKE))
    return (not fitted.fits, level, fitted.plan.ms)
