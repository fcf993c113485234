"""What CUDA's allocator reserves for a candidate: whether it trains in so many bytes, if need be in one piece."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from memrewrite.records.options import format_bytes
from memrewrite.search.asked import Asked, Fit
from memrewrite.search.candidate import Candidate
from memrewrite.search.planning import plan

# How much more than its budget a plan may make the allocator reserve. Another 1 % is for batches of other sizes: they
# leave other blocks behind.
_ROOM = 0.02
_LOWER = (0.98, 0.95, 0.91, 0.86, 0.8, 0.7)  # of the bytes that did not
_TOTALS = 3  # bytes in one piece that are tried, each less by what was too much
_HALVINGS = 5  # of the bytes between which the fewest in one piece are sought
_WHOLE = (
    "Memory would be fragmented, and take {}, if PyTorch got it from the device as tensors ask for it. Therefore the "
    "first forward lets PyTorch hold {}, and gets what it does not hold of that yet in one piece "
    "(torch.cuda.max_memory_allocated counts that once)."
)


def under_cap(asked: Asked, fit: Fit) -> Fit:
    """A plan, if needed another, such that fragmentation leaves room for it under a cap just above the budget.

    One that takes its memory in one piece is preferred to a lower one; where none fits, it is the first, with a note.
    """
    reserved = asked.limit.reserved
    cap = asked.budget if reserved else int((1 + _ROOM) * asked.budget)

    def held(candidate: Candidate) -> int:
        under = candidate.reserved_under(cap)
        return max(under, candidate.simulate().reserved) if reserved else under

    first = None
    for candidate in _lower_and_lower(asked, fit):
        ready = asked.finished(candidate)
        needed = held(ready)
        if needed <= cap and first is None:
            return replace(fit, candidate=ready)
        inferior = ready, needed
        if needed > cap:
            ready, needed = _in_one_piece(asked, ready, needed, cap - asked.stray, held)
        measured = asked.measured(ready) if needed <= cap else None
        if needed <= cap and (measured is None or asked.limit.of(measured) <= asked.budget):
            return replace(fit, candidate=ready, measured=measured)
        first = first or (inferior if reserved else (ready, needed))
    ready, needed = first or (fit.candidate, cap)
    note = (
        f"Where a process may reserve no more than {format_bytes(cap)}, this may run out of memory all the same, "
        f"because memory is fragmented{' by batches of other sizes' * reserved}: {format_bytes(needed)} would do. "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True prevents most of that."
    )
    return replace(fit, candidate=ready.noted(note))


def least_reserved(asked: Asked, candidate: Candidate, limit: int, fewest: bool) -> Candidate:
    """A candidate that was planned, in one piece if it is above that many reserved bytes and takes less so.

    As close to the limit as it gets, or with the ``fewest`` bytes where it gets to no limit.
    """
    ready = asked.finished(candidate)
    needed = ready.simulate().reserved
    if needed <= limit:
        return ready
    return _in_one_piece(asked, ready, needed, limit, lambda it: it.simulate().reserved, fewest)[0]


def _in_one_piece(
    asked: Asked,
    candidate: Candidate,
    needed: int,
    limit: int,
    reserved: Callable[[Candidate], int],
    fewest: bool = False,
) -> tuple[Candidate, int]:
    """The candidate with its memory in one piece, and what is ``reserved`` for it then, ``limit`` bytes if possible.

    The candidate itself where that is no less than it ``needed``, or tensors get so much more than they ask for (see
    ``Allocator``) that the peak is above the budget. ``fewest`` as in ``least_reserved``.
    """
    peak, best = candidate.making_room(0).simulate().peak, (needed, candidate)

    def taken(total: int) -> int:
        nonlocal best
        whole = candidate.making_room(total)
        found = reserved(whole)
        if found < best[0] and (asked.limit.reserved or whole.simulate().peak <= asked.budget):
            best = found, whole
        return found

    total = min(limit, asked.budget)
    for _ in range(_TOTALS):
        if total < peak or best[0] <= limit:
            break
        total -= taken(total) - limit  # tensors of up to 1 MiB lie elsewhere
    low, high = peak, needed
    for _ in range(_HALVINGS if fewest and best[0] > limit else 0):
        before, total = best[0], (low + high) // 2
        low, high = (low, total) if taken(total) < before else (total, high)
    return best[1], best[0]


def telling_of_room(candidate: Candidate) -> Candidate:
    """The candidate with a note, if it takes its memory in one piece."""
    if not candidate.room:
        return candidate
    pieces = candidate.making_room(0).simulate().reserved
    return candidate.noted(_WHOLE.format(format_bytes(pieces), format_bytes(candidate.room)))


def _lower_and_lower(asked: Asked, fit: Fit) -> Iterator[Candidate]:
    """The candidate, and plans for ever less as long as they fit."""
    yield fit.candidate
    candidate = fit.planned
    for share in _LOWER if asked.may_checkpoint else ():
        planned = plan(candidate, int(share * fit.target))
        if not planned.fitted.fits:
            return
        candidate = planned.candidate
        yield candidate
