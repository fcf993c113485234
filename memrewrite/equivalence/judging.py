"""What is allowed of one step in which two models differ: by the original's own noise, by float64, by what is known.

A judge adds to a comparison what it takes for the step to pass, and no more: noise only ever allows more, so that what
passes with the runs there are would pass with all of them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from memrewrite.equivalence.blocks import UnfitError, repeated_blocks
from memrewrite.equivalence.case import Case, TooLargeError
from memrewrite.equivalence.compare import NOISE_RUNS, Comparison, TensorVerdict, fingerprints
from memrewrite.equivalence.reference import Draw, OtherDrawsError, Recorder, double_step
from memrewrite.equivalence.trial import Record, bring_to_cpu
from memrewrite.measurement.snapshot import State
from memrewrite.records.errors import MeasurementError
from memrewrite.torch_internals.spread import local_part

ROUNDING_RUNS = 8
"""How often the original runs at most with other last bits, where its own error does not allow that of the rewritten.

Of a convolution's bias before batch normalization, whose gradient is zero in mathematics, all is rounding: of 8 values
another run has more than twice the error of one in 3 % of cases, of 2 values in 20 %."""
_LUCK = 30  # times what is allowed: more is no luck, but where the original's own error may be 0 by luck
Judge = Callable[[Case, Comparison, int, State, Record, Record], None]


def against_itself(
    case: Case, comparison: Comparison, index: int, before: State, record: Record, rewritten: Record
) -> None:
    """How far the original is from itself in this step, where what other steps have shown of that is not enough.

    Where it differs from itself at all, but not as far: a value with the same bits in some run of both models is right,
    and has shown in the first what such runs differ by.
    """
    comparison.add_sizes(index, record)
    if comparison.passed():
        return
    left = set(comparison.differences[index])
    seen = [fingerprints(record, left)]
    for run in range(NOISE_RUNS * case.steps):  # where it is rare, as often as it takes to see some
        if run >= NOISE_RUNS and comparison.shows_noise():
            break
        before.restore()
        other = case.run_original(None)
        comparison.add_noise(index, record, other)
        if comparison.passed():
            return
        seen.append(fingerprints(other, left))
        del other
    if not comparison.shows_noise():
        return

    def again() -> Record:
        before.restore()
        return case.run_rewritten(None)

    for attempt in itertools.chain([rewritten], (again() for _ in range(NOISE_RUNS))):
        mine = fingerprints(attempt, left)
        shared = {key for key in left & mine.keys() if any(mine[key] == other.get(key) for other in seen)}
        comparison.add_luck(index, shared)
        left -= shared
        if not left:
            return


def against_float64(
    case: Case, comparison: Comparison, index: int, before: State, record: Record, rewritten: Record
) -> None:
    """The errors of both models against the original in float64, on the same random draws; and its noise."""
    draws = _drawn(case, comparison, index, before, record)
    found = _reference(case, before, draws, (record, rewritten))
    comparison.add_reference(record, rewritten, found)
    _round_otherwise(case, comparison, before, record, found)


def against_float64_first(
    case: Case, comparison: Comparison, index: int, before: State, record: Record, rewritten: Record
) -> None:
    """The same, but the original runs again only where it drew random numbers, or where float64 is not enough.

    Nothing is made in float64 where what it left in the steps before is enough.
    """
    if comparison.stays_within(index, record, rewritten):
        return None
    if before.drawn_from(record):
        return against_float64(case, comparison, index, before, record, rewritten)
    try:
        found = _reference(case, before, [], (record, rewritten))
    except OtherDrawsError:  # from a generator of the model's own
        return against_float64(case, comparison, index, before, record, rewritten)
    comparison.add_reference(record, rewritten, found)
    for _ in range(NOISE_RUNS):
        if comparison.passed() or comparison.noise[index]:
            break
        before.restore()
        comparison.add_noise(index, record, case.beside(record).run_original(None))
    return _round_otherwise(case, comparison, before, record, found)


def against_what_is_known(
    case: Case, comparison: Comparison, index: int, before: State, record: Record, rewritten: Record
) -> None:
    """The distance from the original, where it is known how much of one float64 allows; else as above."""
    comparison.add_distance(record, rewritten, case.known)
    if not comparison.passed():
        against_float64_first(case, comparison, index, before, record, rewritten)


def _round_otherwise(case: Case, comparison: Comparison, before: State, record: Record, reference: Record) -> None:
    """Run the original with other last bits until its error allows that of the rewritten model."""

    def runs() -> Iterator[Record]:
        for run in range(ROUNDING_RUNS):
            failed = [verdict for verdict in comparison.verdicts() if not verdict.passed]
            if not failed or any(map(_is_no_luck, failed)):
                return
            before.restore()
            rounded = case.step.amp if all(verdict.negligible for verdict in failed) else None
            _change_last_bits(case.original, run, rounded)
            yield case.beside(record).run_original(None)

    comparison.add_rounding(record, runs(), reference)


def _is_no_luck(verdict: TensorVerdict) -> bool:
    """Whether no run of the original is going to allow that.

    What is zero in mathematics is often zero to the last bit under autocast, where half types round what adds up to it,
    and now and then a rounding error of these: of two tokens the bias of keys, whose gradient attention makes so.
    """
    return verdict.by_noise or (verdict.error > _LUCK * verdict.allowed and not verdict.negligible)


@torch.no_grad()
def _change_last_bits(model: nn.Module, seed: int, rounded: torch.dtype | None) -> None:
    """Move every parameter by up to one rounding error of its type, or of the one it is ``rounded`` to, in place."""
    for parameter in model.parameters():
        part = local_part(parameter.detach())
        if part.is_floating_point() and part.layout == torch.strided:
            change = torch.empty(part.shape, dtype=torch.float64, device=part.device)
            change.uniform_(-1, 1, generator=torch.Generator(part.device).manual_seed(seed))
            part.copy_(change.mul_(torch.finfo(rounded or part.dtype).eps).add_(1).mul_(part))


def _drawn(case: Case, comparison: Comparison, index: int, before: State, record: Record) -> list[Draw]:
    """What the original draws in another run of the step, whose noise counts."""
    case = case.beside(record)
    before.restore()
    with Recorder(case.near) as recorder:
        again = case.run_original(None)
    comparison.add_noise(index, record, again)
    return recorder.draws


def _reference(case: Case, before: State, draws: list[Draw], records: Sequence[Record]) -> Record:
    """What the original computes in float64; where there is no room, ``records`` leave theirs."""
    case = case.beside(records[0])
    found = _in_float64(case, before, draws)
    if found is None and case.near:
        for each in records:
            bring_to_cpu(each)
        before.bring_to_cpu()
        found = _in_float64(replace(case, near=False), before, draws)
        before.bring_back()
    if found is None:
        raise TooLargeError
    return found


def _in_float64(case: Case, before: State, draws: list[Draw]) -> Record | None:
    """The step of the original; where memory runs out, with repeated blocks that run again in backward.

    None where that is too much as well. Of a step that ran out of memory nothing is held any more when the next begins.
    """
    how = case.original, case.inputs, case.step, draws, case.devices, case.input_gradients, case.kept
    sizes = tuple(tensor.shape for tensor in case.inputs.tensors())
    if sizes not in case.too_large or not _blocks(case):
        before.restore()
        try:
            return double_step(*how)
        except torch.OutOfMemoryError:
            case.too_large.add(sizes)
    while blocks := _blocks(case):
        before.restore()
        try:
            return double_step(*how, case.unfit)
        except torch.OutOfMemoryError:
            return None
        except UnfitError as error:
            case.unfit.add(error.kind)
        except MeasurementError as error:  # whatever it is: the model's own, it is met at less, too
            if isinstance(error, OtherDrawsError) and not draws:  # which are recorded then
                raise
            case.unfit.update(map(type, blocks))
    return None


def _blocks(case: Case) -> list[nn.Module]:
    return repeated_blocks(case.original, case.unfit) if case.step.mode == "train" else []
