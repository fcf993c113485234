"""What is there when planning is interrupted: of the plans that were tried, the best one within the budget."""

from collections.abc import Callable

from memrewrite.records.options import Budget
from memrewrite.search.asked import Fit
from memrewrite.search.bench import Tried
from memrewrite.search.candidate import Candidate
from memrewrite.search.inplace import marked_inplace
from memrewrite.search.planning import without_needless_casts

Offer = Callable[[int], bool]
"""Whether a plan whose simulated peak is so many bytes will do."""
_MEASURED = 3  # plans that are measured until one is within the budget, where there is a device


def best_so_far(
    candidate: Candidate, limit: Budget, original: int, names: tuple[str, ...] | None, offer: Offer
) -> Fit | None:
    """The plan of the least time that was tried and is within the budget, of the lowest peak where that is the budget.

    None where none is, or the ``offer`` is declined. The other arguments are those of ``fit_to_budget``, which was
    interrupted. On a device plans are measured.
    """
    bench, budget = candidate.bench, limit.resolve(original)
    known = _within(bench.tried, original if budget is None else budget)
    ordered = sorted(known, key=lambda tried: tried.peak if budget is None else tried.plan.ms)
    if not ordered or not offer(ordered[0].peak):
        return None
    for tried in ordered[:_MEASURED]:
        planned = tried.make()
        ready = marked_inplace(without_needless_casts(planned), names)
        measured = bench.measure(ready.build()) if bench.on_cuda else None
        if budget is None or limit.of(ready.simulate() if measured is None else measured) <= budget:
            return Fit(ready, measured, planned, budget or 0)
    return None


def _within(known: list[Tried], most: int) -> list[Tried]:
    """The plans that lower the peak to at most so many bytes."""
    return [tried for tried in known if tried.peak <= most and tried.plan.intervals]
