"""Does a rewritten model compute the same training step as the original?

Compared after every step: outputs (also their structure, strides and whether they require gradients), loss, every
parameter gradient, the gradients of floating-point inputs, every buffer, the random state of the CPU and of the CUDA
devices in use, training flags. ``memrewrite.equivalence.compare`` says what counts as the same.

With ``exact=True`` both models run freely through the optimizer from the same seed, and parameters after each step are
compared too. With ``exact=False`` every run starts step k from the state the original reached after step k - 1, because
an optimizer such as Adam turns the last bit of a gradient into another path; only if a step is not bit-equal is the
float64 reference (``memrewrite.equivalence.reference``) made. Both models usually share their parameters and buffers,
so they run one after the other from the same restored state. Results stay on the device, where they are compared, as
long as there is room for them beside a step; then they are brought to the CPU, which takes far longer.

Two choices follow from what fused operators hide: where the original runs fused attention with dropout and arithmetic
changed, all runs use ``sdpa_kernel(SDPBackend.MATH)``, and recurrent networks with dropout run without cuDNN.
Verification installs no saved-tensor hooks and refuses to run under them: they switch off autograd's check for
tensors written too early.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from memrewrite.equivalence.compare import HALF, NOISE_RUNS, Comparison, fingerprints
from memrewrite.equivalence.reference import Draw, FusedRandomnessError, Recorder, double_step
from memrewrite.equivalence.sizes import at_less, batch_of, cut_down, halved, smaller_inputs
from memrewrite.equivalence.trial import Kept, Record, bring_to_cpu, deterministic, take_step
from memrewrite.equivalence.verdict import Verdict, concluded
from memrewrite.measurement.snapshot import State, cuda_devices
from memrewrite.records.errors import MeasurementError, UsageError
from memrewrite.runtime.dropin import accept, programs
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.state.random_state import seed_all
from memrewrite.workload.step import Inputs, Step, autocast, device_type


class _OriginalError(Exception):
    """The original model raised; the cause says what."""


class _RewrittenError(Exception):
    """The rewritten model raised; the cause says what."""


class _TooLargeError(Exception):
    """The reference does not fit in device memory, wherever results are kept."""


@dataclass(frozen=True)
class _Case:
    original: nn.Module
    rewritten: nn.Module
    inputs: Inputs
    step: Step
    steps: int
    seed: int
    devices: tuple[torch.device, ...]
    input_gradients: bool = True
    avoid: frozenset[str] = frozenset()  # families of fused random operators
    near: bool = True  # results stay on the device

    @cached_property
    def kept(self) -> Kept:
        """What is compared of a step."""
        alone = any(program.returns == "loss" for program in programs(self.rewritten).values())
        return Kept(outputs=not alone, near=self.near)

    def comparison(self) -> Comparison:
        half = self.step.amp in HALF or any(p.dtype in HALF for p in self.original.parameters())
        return Comparison(half, next(iter(self.devices), torch.device("cpu")))

    def keep(self) -> State:
        return State((self.original, self.rewritten), self.devices, near=self.near)

    def run_original(self, optimizer: torch.optim.Optimizer | None, parameters: bool = True) -> Record:
        kept = replace(self.kept, parameters=parameters)
        try:
            return take_step(self.original, self.inputs, self.step, optimizer, self.devices, self.input_gradients, kept)
        except (torch.OutOfMemoryError, FusedRandomnessError):
            raise
        except Exception as error:
            raise _OriginalError from error

    def run_rewritten(self, optimizer: torch.optim.Optimizer | None) -> Record:
        if (reason := _why_not_run(self)) is not None:
            raise _RewrittenError from FallbackWarning(reason)
        how = self.devices, self.input_gradients, self.kept
        try:
            return take_step(self.rewritten, self.inputs, self.step, optimizer, *how)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _RewrittenError from error


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
) -> Verdict:
    """Compare ``rewritten`` with ``original`` over ``steps`` training steps; inequality is a verdict, not an error.

    Where the step does not fit in device memory it is verified at half the batch, a quarter, and so on. Where sizes of
    the inputs may vary, with ``smaller`` steps at the smallest and in between, too, if the original takes such sizes.
    Afterwards parameters, buffers, gradients, random state and flags are bit for bit as before, also after an error.
    Raises ``MeasurementError`` if nothing could be verified, ``UsageError`` for fewer than one step or under
    saved-tensor hooks, and whatever the original itself raises.
    """
    if steps < 1:
        raise UsageError(f"Cannot verify over {steps} steps; give at least 1.")
    _refuse_hooks()
    devices = cuda_devices((original, rewritten), inputs)
    # A forward that asks whether its inputs need gradients was captured for those of the example.
    of_inputs = all(program.gradients is None for program in programs(rewritten).values())
    case = _Case(original, rewritten, inputs, step.shortest(), steps, seed, devices, of_inputs)
    try:
        state = case.keep()
    except torch.OutOfMemoryError:
        case = replace(case, near=False)
        state = case.keep()
    try:
        with deterministic():
            while True:
                try:
                    verdict = _attempt(case, state, exact, inputs)
                    return _at_smaller_sizes(case, state, exact, verdict) if smaller and verdict.equivalent else verdict
                except (torch.OutOfMemoryError, _TooLargeError) as error:
                    away = case.near and isinstance(error, torch.OutOfMemoryError)
                if away:
                    state.bring_to_cpu()
                less = replace(case, near=False) if away else replace(case, inputs=halved(rewritten, case.inputs))
                case = replace(less, input_gradients=of_inputs, avoid=frozenset())
    finally:
        state.restore()


def _attempt(case: _Case, state: State, exact: bool, full: Inputs) -> Verdict:
    """The verdict at this batch size. Raises ``torch.OutOfMemoryError`` and ``_TooLargeError`` where memory ran out."""
    while True:
        state.restore()
        state.clear_gradients()
        seed_all(case.seed, case.devices)
        try:
            with _without_fused(case.avoid):
                start = state.restarted()
                comparison = _run_freely(case, start) if exact else _run_forced(case, start, _against_float64)
            return concluded(comparison, case.steps, batch_of(case.inputs), at_less(case.inputs, full))
        except FusedRandomnessError as fused:
            if fused.family in case.avoid:
                raise MeasurementError(
                    f"The original draws random numbers inside a fused {fused.family.strip('_')} operator, "
                    "so changed arithmetic cannot be judged; use only exact rewrites (exact=True)."
                ) from fused
            case = replace(case, avoid=case.avoid | {fused.family})
        except _RewrittenError as failure:
            return _raised(failure.__cause__, case, full)
        except _OriginalError as failure:
            cause = failure.__cause__ or failure
            if not case.input_gradients:
                _explain_small_batch(cause, case, full)
                raise cause from None
            # Some models only work on inputs that need no gradient, so they get theirs as the user gave them.
            case = replace(case, input_gradients=False)


def _at_smaller_sizes(case: _Case, state: State, exact: bool, verdict: Verdict) -> Verdict:
    """The verdict, if it is the same where sizes that vary are as small as can be, and where they are in between."""
    verified = 0
    for candidates in smaller_inputs(case.rewritten, case.inputs):
        cases = (replace(case, inputs=inputs, steps=1) for inputs in candidates)
        smaller = next((each for each in cases if _why_not_run(each) is None), None)
        try:
            other = None if smaller is None else _attempt(smaller, state, exact, smaller.inputs)
        except Exception:  # the original does not run at such a size, or cannot be judged there  # noqa: S112
            continue
        if other is not None and not other.equivalent:
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in smaller.inputs.tensors()) if smaller else ""
            return replace(other, summary=f"{other.summary}; for inputs of {sizes}")
        verified += other is not None
    return replace(verdict, summary=f"{verdict.summary}, also at smaller sizes") if verified else verdict


def _run_freely(case: _Case, start: State) -> Comparison:
    """All steps of the original from ``start``, then all of the rewritten model, each with its own optimizer.

    Where they differ and the original differs from itself too, step by step instead: an optimizer such as Adam turns
    noise in a gradient into a step of full size, after which two runs have nothing in common to compare.
    """
    comparison = case.comparison()
    optimizer = case.step.make_optimizer(case.original)
    originals = [case.run_original(optimizer) for _ in range(case.steps)]
    start.restore()
    optimizer = case.step.make_optimizer(case.rewritten)
    equal = [comparison.add_step(record, case.run_rewritten(optimizer)) for record in originals]
    if all(equal):
        return comparison
    for _ in range(NOISE_RUNS):  # as often as it takes to see some
        start.restore()
        optimizer = case.step.make_optimizer(case.original)
        for index, record in enumerate(originals):
            comparison.add_noise(index, record, case.run_original(optimizer))
        if any(comparison.noise):
            start.restore()
            return _run_forced(case, start, _against_itself)
    return comparison


Judge = Callable[[_Case, Comparison, int, State, Record, Record], None]


def _run_forced(case: _Case, before: State, judge: Judge) -> Comparison:
    """Each step of the rewritten model from where the original was, at first ``before``; ``judge`` adds a yardstick."""
    comparison = case.comparison()
    optimizer = case.step.make_optimizer(case.original)
    for index in range(case.steps):
        record = case.run_original(optimizer, parameters=False)
        after = case.keep() if index + 1 < case.steps else before  # no step goes on from the last
        before.restore()
        rewritten = case.run_rewritten(None)
        if not comparison.add_step(record, rewritten):
            judge(case, comparison, index, before, record, rewritten)
        after.restore()
        before = case.keep() if _follow(case.original, case.rewritten) else after
    return comparison


def _against_itself(
    case: _Case, comparison: Comparison, index: int, before: State, record: Record, rewritten: Record
) -> None:
    """How far the original is from itself in this step.

    Where it differs from itself at all, but not as far: a value with the same bits in some run of both models is right,
    and has shown in the first what such runs differ by.
    """
    seen = [fingerprints(record)]
    for _ in range(NOISE_RUNS):
        before.restore()
        other = case.run_original(None)
        comparison.add_noise(index, record, other)
        seen.append(fingerprints(other))

    def again() -> Record:
        before.restore()
        return case.run_rewritten(None)

    left = set(comparison.differences[index])
    for run in itertools.chain([rewritten], (again() for _ in range(NOISE_RUNS))):
        mine = fingerprints(run)
        shared = {key for key in left & mine.keys() if any(mine[key] == other.get(key) for other in seen)}
        comparison.add_luck(index, shared)
        left -= shared
        if not left:
            return


def _against_float64(
    case: _Case, comparison: Comparison, index: int, before: State, record: Record, rewritten: Record
) -> None:
    """The errors of both models against the original in float64, on the same random draws."""
    before.restore()
    with Recorder(case.near) as recorder:
        again = case.run_original(None)
    comparison.add_noise(index, record, again)
    del again
    before.restore()
    found = _reference(case, recorder.draws)
    if found is None and case.near:
        for each in (record, rewritten):
            bring_to_cpu(each)
        before.bring_to_cpu()
        found = _reference(replace(case, near=False), recorder.draws)
    if found is None:
        raise _TooLargeError
    comparison.add_reference(record, rewritten, found)


def _reference(case: _Case, draws: list[Draw]) -> Record | None:
    """What the original computes in float64; None where memory runs out, of which nothing is held any more then."""
    try:
        return double_step(case.original, case.inputs, case.step, draws, case.devices, case.input_gradients, case.kept)
    except torch.OutOfMemoryError:
        return None


def _why_not_run(case: _Case) -> str | None:
    """Why a drop-in would run its original forward for these inputs, which would compare the original with itself."""
    program = getattr(type(case.rewritten), "_memrewrite", None)
    if program is None:
        return None
    with autocast(case.step.amp, device_type(case.rewritten, case.inputs)):
        tensors, reason = accept(program, case.rewritten, case.inputs.args, case.inputs.kwargs)
    return None if tensors is not None else reason or "it was captured in the other of train and eval mode"


def _follow(source: nn.Module, target: nn.Module) -> bool:
    """Copy parameters and buffers where the two models do not share them; whether there were any."""
    mine = dict(itertools.chain(target.named_parameters(), target.named_buffers()))
    theirs = itertools.chain(source.named_parameters(), source.named_buffers())
    pairs = [(mine[name], tensor) for name, tensor in theirs if name in mine]
    apart = [(other, tensor) for other, tensor in pairs if other is not tensor and other.shape == tensor.shape]
    with torch.no_grad():
        for other, tensor in apart:
            other.copy_(tensor)
    return bool(apart)


def _raised(cause: BaseException | None, case: _Case, full: Inputs) -> Verdict:
    if isinstance(cause, FallbackWarning):
        _explain_small_batch(cause, case, full)
    text = f"not equivalent: the rewritten model raised {type(cause).__name__}: {cause}{at_less(case.inputs, full)}"
    return Verdict(False, False, text, (), batch_of(case.inputs))


def _explain_small_batch(cause: BaseException, case: _Case, full: Inputs) -> None:
    if cut := cut_down(case.inputs, full):
        kind, now, whole = cut
        raise MeasurementError(
            f"The step does not fit in memory at {kind} {whole} and does not run at {kind} {now} ({cause}), so it "
            "could not be verified; verify on the CPU or with smaller example inputs."
        ) from cause


@contextlib.contextmanager
def _without_fused(families: frozenset[str]) -> Iterator[None]:
    cudnn = torch.backends.cudnn.enabled
    try:
        torch.backends.cudnn.enabled = cudnn and "_rnn" not in families
        with sdpa_kernel(SDPBackend.MATH) if "attention" in families else contextlib.nullcontext():
            yield
    finally:
        torch.backends.cudnn.enabled = cudnn


def _refuse_hooks() -> None:
    try:
        with disable_saved_tensors_hooks("in use"):
            return
    except RuntimeError as error:
        raise UsageError("Cannot verify under saved_tensors_hooks; leave their context first.") from error
