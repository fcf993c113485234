"""Does a rewritten model compute the same training step as the original?

Compared after every step: outputs (also their structure, strides and whether they require gradients), loss, every
parameter gradient, the gradients of floating-point inputs, every buffer, the random state of the CPU and of the CUDA
devices in use, training flags. ``memrewrite.equivalence.compare`` says what counts as the same.

With ``exact=True`` both models run freely through the optimizer from the same seed, and parameters after each step are
compared too. Where there is no room for the results of all steps beside one, and one optimizer gets the same parameters
in the same order from both, each step is compared before the next instead: as with ``exact=False``, where every run
starts step k from the state the original reached after step k - 1, because an optimizer such as Adam turns the last bit
of a gradient into another path. Then only if a step is not bit-equal is the float64 reference
(``memrewrite.equivalence.reference``) made. A third model may be ``plain``, whose bits the rewritten one must have: it
takes the same steps, and what it computes is compared with what the rewritten model has computed in them. Models
usually share their parameters and buffers, so they run one after the other from the same restored state. Results stay
on the device, where they are compared, as long as there is room for them beside a step; then they are brought to the
CPU, which takes far longer.

No step is taken that could change no verdict. What passes passes with more noise, too: so the original runs again only
until what there is to pass has passed, and noise that one step has shown is not looked for in the next
(``memrewrite.equivalence.judging``). With ``n`` steps, O of the original, R of the rewritten model, P of the plain one,
D in float64:

    exact                                           n O, n R
    exact, where O is noisy                         2 n O, (n + 1) R, and O until noise shows; 2 O and 1 R where n = 1
    exact, step by step                             n O, n R, and O until noise shows where a step differs
    changed                                         n O, n R, 1 D, n P
    changed, where numbers are drawn and recorded   (n + 1) O, n R, 1 D, n P
    changed, where float64 left less to a step      and 1 D for it, and the O that records
    changed, where that allows too little           and O until noise shows, and O with other last bits until it passes
    changed, where P is noisy                       and 1 P, or as many P and R as show what two runs differ by

Where the optimizer steps while backward runs, all of this is compared of steps after backward, of which the gradients
are; then the rewritten model takes two such steps and two after backward, which have to end in the same parameters.

A step in float64 that does not fit in memory is taken once more with repeated blocks that run again in backward
(``memrewrite.equivalence.blocks``), before results leave their room, and before anything is verified at less.

Two choices follow from what fused operators hide: where the original runs fused attention with dropout and arithmetic
changed, all runs use ``sdpa_kernel(SDPBackend.MATH)``, and recurrent networks with dropout run without cuDNN.
Verification installs no saved-tensor hooks and refuses to run under them: they switch off autograd's check for
tensors written too early.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks

from memrewrite.equivalence.case import Case, OriginalError, RewrittenError, TooLargeError
from memrewrite.equivalence.compare import NOISE_RUNS, Comparison
from memrewrite.equivalence.judging import (
    Judge,
    against_float64,
    against_float64_first,
    against_itself,
    against_what_is_known,
)
from memrewrite.equivalence.kernels import without_fused, without_other_kernels
from memrewrite.equivalence.reference import FusedRandomnessError
from memrewrite.equivalence.sizes import at_less, batch_of, cut_down, halved, smaller_inputs
from memrewrite.equivalence.trial import Key, Record, deterministic
from memrewrite.equivalence.verdict import Verdict, concluded
from memrewrite.measurement.snapshot import State, cuda_devices
from memrewrite.records.errors import MeasurementError, UsageError
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.state.random_state import seed_all
from memrewrite.torch_internals.autograd_nodes import acting_hooks_off
from memrewrite.workload.optimizers import own_name
from memrewrite.workload.step import Inputs, Step

_IN_BACKWARD = 2  # steps: in the first the optimizer makes its state


def verify(
    original: nn.Module,
    rewritten: nn.Module,
    inputs: Inputs,
    step: Step,
    *,
    exact: bool,
    steps: int = 3,
    seed: int = 0,
    smaller: bool = True,
    plain: nn.Module | None = None,
    known: Mapping[Key, float] | None = None,
) -> Verdict:
    """Compare ``rewritten`` with ``original`` over ``steps`` training steps; inequality is a verdict, not an error.

    Where the step does not fit in device memory it is verified at half the batch, a quarter, and so on. Where sizes of
    the inputs may vary, with ``smaller`` steps at the smallest and in between, too, if the original takes such sizes;
    chains verified at full size are not compiled, nor is planned by cuDNN what need not be, and the verdict says so.
    Where not ``exact``, the rewritten model must also have the bits of ``plain``, if that is given, and is as near to
    the original as it has to be where it is within what is ``known``: the ``room`` of an earlier verdict on the same.
    Afterwards parameters, buffers, gradients, random state and flags are bit for bit as before, also after an error.
    Raises ``MeasurementError`` if nothing could be verified, ``UsageError`` for no step or under saved-tensor hooks,
    and what the original raises.
    """
    if steps < 1:
        raise UsageError(f"Cannot verify over {steps} steps; give at least 1.")
    _refuse_hooks()
    devices = cuda_devices((original, rewritten), inputs)
    plain = None if exact else plain
    # A forward that asks whether its inputs need gradients was captured for those of the example.
    of_inputs = all(program.gradients is None for program in programs(rewritten).values())
    after = replace(step.shortest(), in_backward=False)
    case = Case(original, rewritten, inputs, after, steps, seed, devices, plain, known or {}, of_inputs)
    case = replace(case, in_backward=step.in_backward)
    try:
        state = case.keep()
    except torch.OutOfMemoryError:
        case = replace(case, near=False, step_by_step=exact and case.optimized_alike())
        state = case.keep()
    try:
        with deterministic(), acting_hooks_off([*original.parameters(), *rewritten.parameters()]):
            while True:
                try:
                    verdict = _also_in_backward(case, _attempt(case, state, exact, inputs))
                    return _at_smaller_sizes(case, state, exact, verdict, inputs) if smaller else verdict
                except (torch.OutOfMemoryError, TooLargeError) as error:
                    ran_out = case.near and isinstance(error, torch.OutOfMemoryError)
                case = replace(_in_less(case, state, exact, ran_out), input_gradients=of_inputs)
    finally:
        state.restore()


def _in_less(case: Case, state: State, exact: bool, ran_out: bool) -> Case:
    """The same in less memory, of which the device ``ran_out`` while results stayed there, or a step takes too much."""
    if not ran_out:
        return replace(case, inputs=halved(case.rewritten, case.inputs))
    if exact and not case.step_by_step and case.optimized_alike():
        return replace(case, step_by_step=True)
    state.bring_to_cpu()
    return replace(case, near=False)


def _attempt(case: Case, state: State, exact: bool, full: Inputs) -> Verdict:
    """The verdict at this batch size. Raises ``torch.OutOfMemoryError`` and ``TooLargeError`` where memory ran out."""
    while True:
        state.restore()
        state.clear_gradients()
        seed_all(case.seed, case.devices)
        try:
            with without_fused(case.avoid):
                start = state.restarted()
                compared = _compared(case, start, exact)
            at = batch_of(case.inputs), at_less(case.inputs, full)
            first, *others = (concluded(comparison, case.steps, *at) for comparison in compared)
            return next((other for other in others if first.equivalent and not other.equivalent), first)
        except FusedRandomnessError as fused:
            if fused.family in case.avoid:
                raise MeasurementError(
                    f"The original draws random numbers inside a fused {fused.family.strip('_')} operator, "
                    "so changed arithmetic cannot be judged; use only exact rewrites (exact=True)."
                ) from fused
            case.avoid.add(fused.family)
        except RewrittenError as failure:
            return _raised(failure.__cause__, case, full)
        except OriginalError as failure:
            cause = failure.__cause__ or failure
            if not case.input_gradients:
                _explain_small_batch(cause, case, full)
                raise cause from None
            # Some models only work on inputs that need no gradient, so they get theirs as the user gave them.
            case = replace(case, input_gradients=False)


def _at_smaller_sizes(case: Case, state: State, exact: bool, verdict: Verdict, full: Inputs) -> Verdict:
    """The verdict, if it is the same where sizes that vary are as small as can be, and where they are in between.

    There a step in float64 is made only where what it left to the full size is not enough.
    """
    if not verdict.equivalent:
        return verdict
    verified = 0
    with without_other_kernels(case, full) as spared:
        for candidates in smaller_inputs(case.rewritten, case.inputs):
            cases = (
                replace(case, inputs=inputs, steps=1, known=verdict.room, in_backward=False) for inputs in candidates
            )
            smaller = next((each for each in cases if each.why_not_run() is None), None)
            try:
                other = None if smaller is None else _attempt(smaller, state, exact, smaller.inputs)
            except Exception:  # the original does not run at such a size, or cannot be judged there  # noqa: S112
                continue
            if other is not None and not other.equivalent:
                sizes = ", ".join(str(tuple(tensor.shape)) for tensor in smaller.inputs.tensors()) if smaller else ""
                return replace(other, summary=f"{other.summary}; for inputs of {sizes}")
            verified += other is not None
    also = f", also at smaller sizes{' without ' if spared else ''}{' and '.join(spared)}"
    return replace(verdict, summary=verdict.summary + also) if verified else verdict


def _also_in_backward(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, in words that say what of it is of steps while backward runs."""
    if not case.in_backward or not verdict.equivalent:
        return verdict
    return replace(verdict, summary=f"{verdict.summary}, parameters also of steps while backward runs")


def _compared(case: Case, start: State, exact: bool) -> list[Comparison]:
    """The comparison with the original and, where there are any, with the plain model and of steps in backward."""
    found = _compared_after_backward(replace(case, in_backward=False), start, exact)
    if case.in_backward and all(comparison.passed() for comparison in found):
        start.restore()
        stepping = replace(case.of(case.rewritten), steps=min(case.steps, _IN_BACKWARD))
        found.append(_run_freely(stepping, start))
    return found


def _compared_after_backward(case: Case, start: State, exact: bool) -> list[Comparison]:
    """Those of steps after backward."""
    if exact:
        return _run_forced(case, start, against_itself) if case.step_by_step else [_run_freely(case, start)]
    first = against_what_is_known if case.known else against_float64_first
    found, *others = _run_forced(case, start, first)
    if not found.passed() and found.lacks_noise():
        start.restore()
        found, *_ = _run_forced(replace(case, plain=None), start, against_float64)
    return [found, *others]


def _run_freely(case: Case, start: State) -> Comparison:
    """All steps of the original from ``start``, then all of the rewritten model, each with its own optimizer.

    Where they differ and the original differs from itself too, step by step instead: an optimizer such as Adam turns
    noise in a gradient into a step of full size, after which two runs have nothing in common to compare.
    """
    comparison = case.comparison()
    optimizer = case.step.make_optimizer(case.original)
    originals = [case.run_original(optimizer) for _ in range(case.steps)]
    start.restore()
    optimizer = case.rewritten_step.make_optimizer(case.rewritten)
    for record in originals:
        rewritten = case.run_rewritten(optimizer)
        if not comparison.add_step(record, rewritten):
            break
    else:
        return comparison
    differing = {kind for kind, _ in comparison.differences[-1]}
    noisy = _noisy(case, comparison, start, originals)
    if not noisy or case.in_backward or differing == {"parameter"}:  # of the same gradients
        return comparison
    if case.steps == 1:
        alone = comparison.without("parameter")
        against_itself(case, alone, 0, start, originals[0], rewritten)
        return alone
    del originals, record, rewritten, optimizer
    start.restore()
    found, *_ = _run_forced(case, start, against_itself, comparison.shares())
    return found


def _noisy(case: Case, comparison: Comparison, start: State, originals: list[Record]) -> bool:
    """Whether the original, run again, differs from these steps; only as far as the first that does is it noise."""
    for record in originals[len(comparison.noise) :]:
        comparison.add_step(record, record)
    for _ in range(NOISE_RUNS):  # as often as it takes to see some
        start.restore()
        optimizer = case.step.make_optimizer(case.original)
        for index, record in enumerate(originals):
            comparison.add_noise(index, record, case.run_original(optimizer))
            if comparison.noise[index]:
                return True
    return False


def _run_forced(case: Case, before: State, judge: Judge, seen: Mapping[str, float] | None = None) -> list[Comparison]:
    """Each step of the rewritten model from where the original was, at first ``before``; ``judge`` adds a yardstick.

    Of the plain model, too, if there is one, whose noise is its yardstick. ``seen`` is what is known of noise.
    """
    comparison, beside = replace(case.comparison(), seen=seen or {}), case.comparison()
    optimizer = case.step.make_optimizer(case.original)
    for index in range(case.steps):
        record = case.run_original(optimizer, parameters=False)
        after = case.keep() if index + 1 < case.steps else before  # no step goes on from the last
        before.restore()
        rewritten = case.run_rewritten(None)
        if not comparison.add_step(record, rewritten):
            judge(case, comparison, index, before, record, rewritten)
        del record
        if case.plain is not None:
            _beside_plain(case.of(case.plain).beside(rewritten), beside, index, before, rewritten)
        del rewritten
        after.restore()
        before = case.keep() if _follow(case.original, case.rewritten) else after
    return [comparison] if case.plain is None else [comparison, beside]


def _beside_plain(case: Case, comparison: Comparison, index: int, before: State, rewritten: Record) -> None:
    """One step of the plain model, which ``case`` has in the place of the original."""
    before.restore()
    record = case.run_original(None)
    if not comparison.add_step(record, rewritten):
        against_itself(case, comparison, index, before, record, rewritten)


def _follow(source: nn.Module, target: nn.Module) -> bool:
    """Copy parameters and buffers where the two models do not share them; whether there were any."""
    mine, theirs = (
        {own_name(name): tensor for name, tensor in itertools.chain(each.named_parameters(), each.named_buffers())}
        for each in (target, source)
    )
    pairs = [(mine[name], tensor) for name, tensor in theirs.items() if name in mine]
    apart = [(other, tensor) for other, tensor in pairs if other is not tensor and other.shape == tensor.shape]
    with torch.no_grad():
        for other, tensor in apart:
            other.copy_(tensor)
    return bool(apart)


def _raised(cause: BaseException | None, case: Case, full: Inputs) -> Verdict:
    if isinstance(cause, FallbackWarning):
        _explain_small_batch(cause, case, full)
    text = f"not equivalent: the rewritten model raised {type(cause).__name__}: {cause}{at_less(case.inputs, full)}"
    return Verdict(False, False, text, (), batch_of(case.inputs))


def _explain_small_batch(cause: BaseException, case: Case, full: Inputs) -> None:
    if cut := cut_down(case.inputs, full):
        kind, now, whole = cut
        raise MeasurementError(
            f"The step does not fit in memory at {kind} {whole} and does not run at {kind} {now} ({cause}), so it "
            "could not be verified; verify on the CPU or with smaller example inputs."
        ) from cause


def _refuse_hooks() -> None:
    try:
        with disable_saved_tensors_hooks("in use"):
            return
    except RuntimeError as error:
        raise UsageError("Cannot verify under saved_tensors_hooks; leave their context first.") from error
