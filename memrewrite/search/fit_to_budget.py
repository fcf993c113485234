"""From a budget to a candidate that is within it: by simulation, and on a GPU by what is measured there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from memrewrite.plan.refine import ALIKE
from memrewrite.records.errors import UsageError
from memrewrite.records.options import Budget
from memrewrite.records.outcomes import Measured
from memrewrite.search import registry
from memrewrite.search.asked import RESERVE, Asked, Fit, Unmet
from memrewrite.search.candidate import Candidate
from memrewrite.search.inplace import marked_inplace
from memrewrite.search.planning import (
    Planned,
    plan,
    promised,
    promises_below,
    rewritten_lower,
    rewritten_lowest,
    rewritten_slower,
    with_inputs_cast,
)
from memrewrite.search.reserved import least_reserved, telling_of_room, under_cap

_CORRECTIONS = 6  # plans made after the device's own peak was seen
_MARGIN = 0.0005  # what each of them leaves of the budget besides, times its number


def limit_for(budget: str | int | Budget | None, reserved: bool, kind: str) -> Budget | None:
    """The budget that is meant; raises ``UsageError`` where there is nothing of the kind that it bounds."""
    if budget is None:
        if reserved:
            raise UsageError("reserved says what a budget bounds, and there is none; give a budget.")
        return None
    limit = Budget.parse(budget)
    limit = replace(limit, reserved=reserved or limit.reserved)
    if limit.reserved and kind != "cuda":
        raise UsageError('Nothing is reserved on the CPU; leave out reserved, or plan for CUDA with device "cuda".')
    return limit


def fit_to_budget(candidate: Candidate, limit: Budget, original: int, names: tuple[str, ...] | None) -> Fit | Unmet:
    """Plan until the peak is within the budget, as it is measured on a GPU, else as it is simulated.

    There what is found by simulation is measured, and where that takes more than the budget every plan before it, too.
    Plans are made by what is allocated; for a budget of reserved bytes by ever less, until what the allocator reserves
    is within it. Then it is simulated whether the plan trains, with smaller batches between, in a process that may
    reserve no more than those bytes, or than 2 % more than a budget of others; else lower ones are tried. A plan for
    ``torch.compile`` is measured compiled, and its reserved bytes are not known.
    """
    asked = Asked(candidate.bench, limit, limit.resolve(original) or 0, original, names)
    if not (asked.bench.on_cuda and asked.bench.target.exact) or limit.reserved:
        return _within(asked, candidate)
    found = _within(replace(asked, measures=False), candidate)
    if isinstance(found, Unmet):
        return found
    measured = asked.measured(found.candidate)
    if measured is None or limit.minimum or measured.peak <= asked.budget:
        return replace(found, measured=measured)
    return _within(asked, candidate)


def _within(asked: Asked, candidate: Candidate) -> Fit | Unmet:
    """What there is within the budget, as it is returned."""
    fuses = asked.bench.target.fuses
    found = _compiled(asked, candidate) if fuses else _with_lower(asked, candidate)
    if isinstance(found, Unmet):
        return found
    if asked.limit.minimum or fuses or asked.bench.device != "cuda":
        found = replace(found, candidate=asked.finished(found.candidate))
    else:
        found = under_cap(asked, found)
    return replace(found, candidate=telling_of_room(found.candidate))


def _found(asked: Asked, candidate: Candidate) -> Fit | Unmet:
    """What there is within the budget, after the rewrites that cost time where it takes more without them."""
    if asked.exceeded_by(candidate):
        candidate = rewritten_slower(candidate, asked.names)
    return _above_the_optimizer(asked, candidate) or _corrected(asked, candidate)


def _compiled(asked: Asked, candidate: Candidate) -> Fit | Unmet:
    """What there is within the budget for the compiler, with the rewrites for a lower peak where that is needed.

    To compile takes long: the lowest peak is looked for with these alone, where any are made.
    """
    lower = rewritten_lower(candidate, asked.names, wide=True)
    if lower.programs == candidate.programs:
        return _told(_found(asked, candidate), lower)
    if asked.limit.minimum:
        return _found(asked, lower)
    found = _found(asked.unless_far(asked.budget), candidate)
    return min(found, _found(asked, lower), key=_bytes(asked)) if isinstance(found, Unmet) else _told(found, lower)


def _with_lower(asked: Asked, candidate: Candidate) -> Fit | Unmet:
    """What there is within the budget, or with the rewrites for a lower peak, where that is needed or takes less time.

    Without them it is given up where that stays far from the budget, and looked for once more where they do not help.
    """
    if asked.limit.minimum:
        return _lowest(asked, candidate)
    found = without = _found(asked.unless_far(asked.budget), candidate)
    needed = isinstance(found, Unmet)
    in_segments = any(region.marks for region in found.candidate.regions)
    if not needed and (not in_segments or found.candidate.times() is None):
        return found
    known, made, bar = {candidate.programs}, [], _bar_of(asked, candidate, without)
    for lower in _lower_ones(asked, candidate):
        made.append(lower)
        if lower.programs in known or not _may_be_lower(lower, bar):
            continue
        known.add(lower.programs)
        other = _found(asked, lower)
        found, bar = min(found, other, key=_bytes(asked) if needed else _time), min(bar, _bar_of(asked, lower, other))
        if isinstance(found, Fit):
            return found
    if isinstance(found, Fit):
        return found
    for less in made:
        lower = rewritten_lowest(less, asked.names)
        if lower.programs in known or not _may_be_lower(lower, bar):
            continue
        other = _found(asked, lower)
        if isinstance(other, Fit):
            return _with_fewer(asked, less, other, bar)
        found, bar = min(found, other, key=_bytes(asked)), min(bar, _bar_of(asked, lower, other))
    return _told(min(_looked_for_on(asked, candidate, without), found, key=_bytes(asked)), lower)


def _bar_of(asked: Asked, candidate: Candidate, found: Fit | Unmet) -> float:
    """The bar where this candidate was planned without a fit; none where it has one, or was given up."""
    if isinstance(found, Fit) or found.given_up:
        return inf
    return _bar(asked, candidate, found.lowest)


def _bar(asked: Asked, candidate: Candidate, reached: int) -> float:
    """The bytes below which another candidate has to promise a plan, where this one ``reached`` so many.

    Both are told by the estimate: plans that were found take up to 4 % less, of whichever candidate.
    """
    return max(reached, promised(rewritten_slower(candidate, asked.names))) if asked.may_checkpoint else inf


def _may_be_lower(candidate: Candidate, bar: float) -> bool:
    """Whether it promises less than that by more than what is alike differs."""
    return bar == inf or promises_below(candidate, (1 - ALIKE) * bar)


def _looked_for_on(asked: Asked, candidate: Candidate, found: Fit | Unmet) -> Fit | Unmet:
    """What was found, or where that was given up what is found without giving up."""
    return _found(asked, candidate) if isinstance(found, Unmet) and found.given_up else found


def _lowest(asked: Asked, candidate: Candidate) -> Fit | Unmet:
    """What takes the fewest bytes, with the rewrites for a lower peak or without them.

    None is looked for without them that promises no less; where those take no more than the optimizer's step does, none
    but the model as it is.
    """
    lower = [rewritten_lowest(each, asked.names) for each in _lower_ones(asked, candidate)]
    made = [each for each in lower if each.programs != candidate.programs]
    if not made:
        return _told(_found(asked, candidate), lower[0])
    if asked.may_checkpoint:
        made = [_most_promising(made)]
    best = min((_found(asked, each) for each in made), key=_bytes(asked))
    timeline = best.candidate.simulate(blocks=False)
    if timeline.peak > (1 + ALIKE) * timeline.peak_of_optimizer:
        bar = _bar(asked, made[0], timeline.peak)
        without = _may_be_lower(rewritten_slower(candidate, asked.names), bar)
    else:
        without = candidate.rehearse(timeline, 0) <= timeline.peak
    if without:
        best = min(_found(asked.unless_far(_bytes(asked)(best)[1]), candidate), best, key=_bytes(asked))
    return _told(best, lower[0])


def _most_promising(candidates: Sequence[Candidate]) -> Candidate:
    """The first of one or two, unless the second promises less by more than what is alike differs."""
    first, last = candidates[0], candidates[-1]
    return last if last is not first and promised(last) < (1 - ALIKE) * promised(first) else first


def _with_fewer(asked: Asked, candidate: Candidate, found: Fit, bar: float) -> Fit:
    """What fits in the least time, with some of the rewrites for the lowest peak or, as ``found``, with all of them.

    Where times are not known, the last that fits is taken: no other is looked for. ``bar`` is that of what has none.
    """
    others = registry.without_one_of_the_lowest(asked.names)
    if found.candidate.times() is None:
        fitting = (_fit_of(asked, candidate, names, bar) for names in reversed(others))
        return next(filter(None, fitting), found)
    known = [fit for names in others if (fit := _fit_of(asked, candidate, names, bar)) is not None]
    return min([*reversed(known), found], key=_time)


def _fit_of(asked: Asked, candidate: Candidate, names: tuple[str, ...], bar: float) -> Fit | None:
    """What fits with these rewrites for the lowest peak; None where none does, or they do nothing for it."""
    lower = rewritten_lowest(candidate, names)
    if lower.programs == candidate.programs or not _may_be_lower(lower, bar):
        return None
    found = _found(asked.unless_far(asked.budget), lower)
    return found if isinstance(found, Fit) else None


def _lower_ones(asked: Asked, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate after the rewrites for a lower peak: of many rows at once, then, where that differs, of few.

    One alone, that is the candidate as it was, where none is made.
    """
    wide = rewritten_lower(candidate, asked.names, wide=True)
    yield wide
    narrow = rewritten_lower(candidate, asked.names, wide=False)
    if narrow.programs != wide.programs:
        yield narrow


def _told(found: Fit | Unmet, lower: Candidate) -> Fit | Unmet:
    """What was found, with what the rewrites of another candidate said."""
    return replace(found, candidate=found.candidate.telling(lower))


def _bytes(asked: Asked) -> Callable[[Fit | Unmet], tuple[bool, int]]:
    """What fits comes first, then what is lower."""

    def rank(found: Fit | Unmet) -> tuple[bool, int]:
        if isinstance(found, Unmet):
            return True, found.lowest
        return False, asked.limit.of(found.measured or found.candidate.simulate())

    return rank


def _time(found: Fit | Unmet) -> tuple[bool, float]:
    """What fits comes first, then what takes fewer ms, as predicted."""
    return isinstance(found, Unmet), max(found.candidate.times() or (inf,))


def _above_the_optimizer(asked: Asked, candidate: Candidate) -> Unmet | None:
    """The outcome of a budget that the optimizer's step alone exceeds, None of any other.

    What else would fit is then simulated with a plan whose forward and backward are within the budget.
    """
    alone = (asked.bench.usual or candidate.simulate(blocks=False)).peak_of_optimizer  # whatever ran before
    if asked.limit.minimum or alone <= asked.budget + asked.reserve or not asked.binds:
        return None
    if asked.may_checkpoint:
        candidate = plan(candidate, alone, spare=alone - asked.budget + asked.reserve).candidate
    candidate = marked_inplace(candidate, asked.names)
    return Unmet(candidate, asked.limit.of(candidate.simulate()))


def _corrected(asked: Asked, candidate: Candidate) -> Fit | Unmet:
    """Plan, look at what that really takes, and plan for as much less as it was more, until it is within the budget."""
    bench, limit, budget = asked.bench, asked.limit, asked.budget
    target, missed, lowest, in_turn, stray = budget - asked.reserve, 0, None, False, asked.stray
    for attempt in range(1, _CORRECTIONS + 1):
        planned = asked.plan(candidate, target, in_turn)
        candidate = planned.candidate
        if planned.given_up:
            return Unmet(candidate, planned.fitted.peak, given_up=True)
        last = not planned.fitted.fits and not limit.minimum
        ready = candidate
        if limit.reserved and not bench.target.fuses:
            ready = least_reserved(asked, candidate, budget - stray, fewest=last or limit.minimum)
        elif last:
            ready = marked_inplace(candidate, asked.names)
        if last:
            found = _least(asked, ready, missed)
            judged = bench.target.exact or not bench.on_cuda  # else it may take less
            if judged and found > budget and asked.binds:  # else the model fits as it is
                return Unmet(ready, found + stray if lowest is None else min(found + stray, lowest))
        if not bench.on_cuda and (last or bench.device != "cuda"):
            return Fit(ready, None, candidate, target)
        known = attempt < _CORRECTIONS and not last and _told_above(asked, ready)
        measured = None if known else asked.measured(ready)
        if measured is not None and not bench.target.exact and (limit.minimum or (last and measured.peak > budget)):
            ready, measured = _lowest_compiled(asked, replace(planned, candidate=ready), measured)
        peak = limit.of(ready.simulate() if measured is None else measured)
        if limit.minimum or peak <= budget - (0 if last else asked.reserve):
            return Fit(ready, measured, candidate, target)
        if limit.reserved and peak - ready.simulate().reserved > stray:  # then first as much less for the same plan
            stray = peak - ready.simulate().reserved
            continue
        if last:
            break
        in_turn = bench.target.on_demand and attempt > 1  # it takes time: where less room is not enough
        missed = peak - planned.fitted.peak if limit.reserved else max(missed, peak - planned.fitted.peak)
        lowest = peak if lowest is None or not limit.reserved else min(peak, lowest)
        margin = int(attempt * _MARGIN * budget)  # each plan misses by its own bytes
        target = min(target, budget - asked.reserve - missed) - margin
    if peak <= budget:
        return Fit(ready, measured, candidate, target)
    return Unmet(ready, peak if not limit.reserved else min(peak, lowest or peak))


def _told_above(asked: Asked, candidate: Candidate) -> bool:
    """Whether a plan need not be measured to be known to take more than it may: blocks are simulated, too."""
    if asked.limit.minimum or asked.limit.reserved or not asked.bench.target.exact:
        return False
    return asked.limit.of(candidate.simulate()) > asked.budget - asked.reserve


def _least(asked: Asked, candidate: Candidate, missed: int) -> int:
    """The bytes of the lowest plan, which was ``missed`` by so much as others were measured."""
    found = asked.limit.of(candidate.simulate())
    if asked.limit.reserved:  # which may well be less than where more is allocated
        return found
    return max(found, candidate.simulate(blocks=False).peak + missed)


def _lowest_compiled(asked: Asked, planned: Planned, measured: Measured) -> tuple[Candidate, Measured]:
    """The lowest compiled peak: by plans that leave more to spare, and with inputs cast before their segments."""
    alone = planned.candidate.simulate().peak
    wanted = int((1 + RESERVE) * alone) if asked.limit.minimum else asked.budget
    candidate, measured = _below_the_optimizer(planned, measured, wanted)
    cast = with_inputs_cast(candidate)
    if cast is not candidate:
        again = candidate.bench.measure(cast.build())
        if again.peak < measured.peak:
            return cast, again
    return candidate, measured


def _below_the_optimizer(planned: Planned, measured: Measured, wanted: int) -> tuple[Candidate, Measured]:
    """The lowest compiled peak, where a plan, measured so, was only sought to take no more than the optimizer does.

    Compiled, forward and backward may take more than is simulated, each plan's by its own bytes. So plans leave ever
    more to spare, twice what the last one took more, until the measured peak is ``wanted`` or nothing lies lower.
    """
    best = planned.candidate, measured
    while measured.peak > wanted and _at_the_optimizer(planned):
        spare = 2 * (measured.peak - planned.candidate.simulate(blocks=False).peak_of_passes)
        planned = plan(planned.candidate, 0, spare, planned.in_turn)
        measured = planned.candidate.bench.measure(planned.candidate.build())
        if measured.peak < best[1].peak:
            best = planned.candidate, measured
    return best


def _at_the_optimizer(planned: Planned) -> bool:
    return planned.fitted.peak == planned.candidate.simulate(blocks=False).peak_of_optimizer
