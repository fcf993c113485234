"""From a budget to a plan that is within it: by simulation, and on a GPU by what is measured there."""

from dataclasses import replace

from memrewrite.advice import infeasible
from memrewrite.measurement import measuring
from memrewrite.plan.refine import Fitted
from memrewrite.records.errors import UsageError
from memrewrite.records.options import Budget, format_bytes
from memrewrite.records.outcomes import Measured
from memrewrite.search import pipeline
from memrewrite.search.inplace import mark_inplace
from memrewrite.workload.step import device_type

_CORRECTIONS = 6  # plans made after the device's own peak was seen
_MARGIN = 0.0005  # what each of them leaves of the budget besides, times its number
# What a plan leaves of a budget on CUDA: which blocks the caching allocator hands out, up to 1 MiB more than was asked
# for, depends on what ran before. In other processes peaks were 0.04 % higher.
_RESERVE = 0.002
# How much more than its budget a plan may make the allocator reserve. Another 1 % is for batches of other sizes: they
# leave other blocks behind.
_ROOM = 0.02
_LOWER = (0.98, 0.95, 0.91, 0.86)  # of the bytes that did not


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


def meet(line: pipeline.Line, limit: Budget, original: int, names: tuple[str, ...] | None) -> Measured | None:
    """Plan until the peak is within the budget, as it is measured on a GPU, else as it is simulated.

    Plans are made by what is allocated; for a budget of reserved bytes by ever less, until what the allocator reserves
    is within it. For another, it is simulated whether the plan trains in a process that may reserve 2 % more than the
    budget, else lower ones are tried. A plan for ``torch.compile`` is measured compiled, and its reserved bytes are
    not known.
    Raises ``BudgetInfeasibleError`` when the lowest reachable peak is above it.
    """
    measured, target = _meet(line, limit, original, names)
    budget = limit.resolve(original)
    if budget is None or limit.reserved or line.compiled or line.step.device_type(line.model, line.inputs) != "cuda":
        return measured
    return _under_cap(line, budget, target, measured, names)


def _under_cap(
    line: pipeline.Line, budget: int, target: int, measured: Measured | None, names: tuple[str, ...] | None
) -> Measured | None:
    """Lower the plan for ``target`` bytes until fragmentation leaves room for it under a cap just above the budget.

    Where none of a few lower ones has it, that plan stays, with a note.
    """
    cap = int((1 + _ROOM) * budget)
    needed = line.reserved_under(cap)
    if needed <= cap:
        return measured
    for share in _LOWER if _may_checkpoint(line, names) else ():
        if not pipeline.plan(line, int(share * target)).fits:
            break
        if line.reserved_under(cap) <= cap:
            return None if measured is None else _measured(line)
    if _may_checkpoint(line, names):
        pipeline.plan(line, target)
    line.notes += (
        f"Where a process may reserve no more than {format_bytes(cap)}, this may run out of memory all the same, "
        f"because memory is fragmented: {format_bytes(needed)} would do. PYTORCH_CUDA_ALLOC_CONF="
        "expandable_segments:True prevents most of that.",
    )
    return measured


def _meet(
    line: pipeline.Line, limit: Budget, original: int, names: tuple[str, ...] | None
) -> tuple[Measured | None, int]:
    """``meet`` but for what fragments memory; also the bytes that the plan was made for."""
    budget = limit.resolve(original) or 0
    if limit.of(line.simulate()) > budget:
        pipeline.rewrite_slower(line, names)
    on_cuda = device_type(line.model, line.inputs) == "cuda"
    reserve = int(_RESERVE * budget) if on_cuda else 0
    target, missed = budget - reserve, 0
    alone = line.simulate(blocks=False).peak_of_optimizer
    if not limit.minimum and alone > budget + reserve and (on_cuda or original > budget):
        if _may_checkpoint(line, names):  # so that what else would fit is simulated with a plan within the target
            pipeline.plan(line, alone, spare=alone - target)
        mark_inplace(line, names)
        raise infeasible(line, limit, budget, limit.of(line.simulate()))
    lowest = None
    for attempt in range(1, _CORRECTIONS + 1):
        fitted = pipeline.plan(line, target) if _may_checkpoint(line, names) else pipeline.no_plan(line, target)
        last = not fitted.fits and not limit.minimum
        if last:
            mark_inplace(line, names)
            found = limit.of(line.simulate())
            if not limit.reserved:  # which may well be less than where more is allocated
                found = max(found, line.simulate(blocks=False).peak + missed)
            judged = not (on_cuda and line.compiled)  # compiled, it may take less
            if judged and found > budget and (on_cuda or original > budget):  # else the model fits as it is
                raise infeasible(line, limit, budget, found if lowest is None else min(found, lowest))
        if not on_cuda and (last or not line.step.as_cuda):
            return None, target
        measured = _measured(line) if on_cuda else None
        if measured is not None and line.compiled and (limit.minimum or (last and measured.peak > budget)):
            wanted = int((1 + _RESERVE) * line.simulate().peak) if limit.minimum else budget
            measured = _with_inputs_cast(line, _below_the_optimizer(line, fitted, measured, wanted))
        peak = limit.of(line.simulate() if measured is None else measured)
        if limit.minimum or peak <= budget - (0 if last else reserve):
            return measured, target
        if last:
            break
        line.in_turn = line.compiled and attempt > 1  # it takes time: where less room is not enough
        missed = peak - fitted.peak if limit.reserved else max(missed, peak - fitted.peak)
        lowest = peak if lowest is None or not limit.reserved else min(peak, lowest)
        margin = int(attempt * _MARGIN * budget)  # each plan misses by its own bytes
        target = min(target, budget - reserve - missed) - margin
    if peak <= budget:
        return measured, target
    raise infeasible(line, limit, budget, peak if not limit.reserved else min(peak, lowest or peak))


def _measured(line: pipeline.Line) -> Measured:
    return measuring.measure(line.build(), line.inputs, line.step.shortest(), steps=3, compiled=line.compiled)


def _below_the_optimizer(line: pipeline.Line, fitted: Fitted, measured: Measured, wanted: int) -> Measured:
    """The lowest compiled peak, where ``fitted``, measured so, was only sought to take no more than the optimizer does.

    Compiled, forward and backward may take more than is simulated, each plan's by its own bytes. So plans leave ever
    more to spare, twice what the last one took more, until the measured peak is ``wanted`` or nothing lies lower.
    """
    best, plan = measured, fitted.plan
    while measured.peak > wanted and fitted.peak == (timeline := line.simulate(blocks=False)).peak_of_optimizer:
        fitted = pipeline.plan(line, 0, spare=2 * (measured.peak - timeline.peak_of_passes))
        measured = _measured(line)
        if measured.peak < best.peak:
            best, plan = measured, fitted.plan
    if fitted.plan != plan:
        line.segments(plan)
    return best


def _with_inputs_cast(line: pipeline.Line, measured: Measured) -> Measured:
    """The lowest compiled peak, which is ``measured``, with inputs cast before their segments if it is lower then."""
    restore = pipeline.cast_inputs(line)
    if restore is not None:
        again = _measured(line)
        if again.peak < measured.peak:
            return again
        restore()
    return measured


def _may_checkpoint(line: pipeline.Line, names: tuple[str, ...] | None) -> bool:
    return line.step.mode == "train" and (names is None or "checkpoint_segments" in names)
