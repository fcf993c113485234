"""``optimize``: capture, observe, rewrite, plan, verify, measure; the last two stages also by themselves."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from memrewrite.capture.hazards import refuse_weight_hooks
from memrewrite.costs.profile import profile_on
from memrewrite.equivalence import verifying
from memrewrite.equivalence.verifying import Verdict
from memrewrite.measurement import measuring
from memrewrite.measurement.measuring import predict
from memrewrite.records.attached import attach
from memrewrite.records.errors import CaptureError, MemrewriteError, NotEquivalentError, UsageError
from memrewrite.records.loop import TUTORIAL, Loop
from memrewrite.records.options import Budget, check_passes, check_seed
from memrewrite.records.outcomes import Measured
from memrewrite.records.report import Report
from memrewrite.report.assembly import report_on
from memrewrite.search import pipeline, registry
from memrewrite.search.budgeting import limit_for, meet
from memrewrite.search.inplace import mark_inplace
from memrewrite.search.regions import find
from memrewrite.simulate import Timeline
from memrewrite.simulate.devices.workspaces import workspace_bytes
from memrewrite.workload.sharding import bucket_notes, refuse_sharded
from memrewrite.workload.step import Inputs, Step, device_of, optimizers_like
from memrewrite.workload.stepspec import amp_dtype, optimizer_factory

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Optimizer = str | torch.optim.Optimizer | type[torch.optim.Optimizer] | Factory | None


class OptimizedModule(nn.Module):
    """The type of what ``optimize`` returns: a module of the user's own class that carries ``report``."""

    report: Report


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    example_kwargs: dict[str, Any] | None = None,
    budget: str | int | Budget | None = None,
    reserved: bool = False,
    optimizer: Optimizer = "adamw",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    device: str | torch.device | None = None,
    regions: Sequence[str] | None = None,
    passes: Iterable[str] | None = None,
    exact: bool = False,
    compiled: bool = False,
    verify: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda stage: None,
) -> "OptimizedModule":
    """A drop-in for ``model`` whose training step peaks within ``budget`` bytes, proved equivalent to it.

    ``example_inputs`` is a tensor or a tuple; ``budget`` text such as ``"8GB"``, ``"60%"`` or ``"min"``, an int of
    bytes or a ``Budget``, and bounds the peak of a steady step: parameters, gradients, optimizer state, inputs,
    activations, temporaries and library workspaces; with ``reserved`` it bounds what CUDA's caching allocator holds for
    it, which is what a cap on the process counts. ``optimizer`` is ``"none"``, ``"sgd"``, ``"sgd-momentum"``,
    ``"adam"``, ``"adamw"``, either with ``-fused``, an optimizer to copy, its class or a factory, or None;
    ``loss_fn(output)`` gives a scalar; ``amp`` is ``"bf16"`` or ``"fp16"``; ``mode`` is by default the one the model is
    in; ``micro_batches`` says over how many batches like these gradients are accumulated before each step of the
    optimizer. ``loop`` is what your loop keeps alive: what PyTorch's tutorials do, or habits as in
    ``"drop-output,prefetch"`` (``memrewrite.records.loop``); what ``loss_fn`` holds counts as its targets. ``device``
    is where the model lies, or, for a model on the CPU where there is no CUDA, ``"cuda"`` to plan for it: then peaks
    are predicted for CUDA, nothing is measured, equivalence is verified on the CPU, and the result takes inputs on the
    CPU. ``regions`` are patterns of submodule paths (``"layers.*"``) to capture one by one, whose own hooks keep
    firing; by default the whole model is captured, else its largest submodules that can be. ``passes`` names those
    allowed, ``exact`` keeps the forward bit-equal. ``compiled=True`` is for a result that ``torch.compile`` will get,
    which fuses what it runs again and makes each node as backward asks for it: the plan then counts products alone,
    keeps those worth it, and divides only segments where that costs nothing. The predicted peak stays that of the
    uncompiled module, less what casts to wider types take there, with gradients of zeros (``simulate.tangents``); the
    one that is measured, on a GPU, and held to the budget there is that of the compiled one. ``verify=False`` returns
    the result unproved.

    The result shares every Parameter and buffer with ``model``, is an instance of its class, and carries ``.report``
    (where the class has a ``report`` of its own that stays, and ``memrewrite.report_of(result)`` gives ours); where
    nothing was to rewrite, or the rewrites would raise the peak, it is ``model`` itself. ``model`` is left as it is;
    hooks on it are not called meanwhile and work on the result as before. ``progress`` is told each stage.
    Raises ``CaptureError``, ``BudgetInfeasibleError``, ``NotEquivalentError``, ``MeasurementError``, ``UsageError``.
    """
    names = (passes,) if isinstance(passes, str) else None if passes is None else tuple(passes)
    check_passes(names)
    check_seed(seed)
    inputs = _inputs(example_inputs, example_kwargs)
    _refuse_replaced(model)
    refuse_sharded(model)
    step = make_step(model, optimizer, loss_fn, amp, mode, micro_batches, loop)
    step = replace(step, as_cuda=_as_cuda(device, device_of(model, inputs)))
    bare = pipeline.without_hooks(model)
    limit = limit_for(budget, reserved, step.device_type(model, inputs))
    progress("simulate")
    workspace = workspace_bytes(device_of(model, inputs), step.amp, step.mode, step.as_cuda)
    before = simulate_original(bare, inputs, step, workspace, attribute=True)
    progress("capture")
    found = find(bare, inputs, step, regions)
    step = replace(step, compiled=compiled)
    parts = [pipeline.Part(region, step) for region in found.found]
    profile = profile_on(device_of(model, inputs))
    notes = (*found.notes, *(bucket_notes(model) if step.mode == "train" else ()))
    line = pipeline.Line(bare, inputs, step, workspace, parts, notes, found.left, profile)
    if profile is not None:
        progress("profile")
        line.original = line.times()
    progress("rewrite")
    pipeline.rewrite(line, names, exact)
    measured = None
    if limit is not None:
        progress("plan")
        measured = meet(line, limit, limit.of(before), names)
        pipeline.drop_needless_casts(line)
    mark_inplace(line, names)
    modified = any(result.modified for result in line.results.values())
    after = line.simulate()
    bound = 0 if limit is None else limit.resolve(limit.of(before)) or 0
    if not modified and (limit is None or limit.of(before) <= max(bound, limit.of(after))):
        return _with_report(model, report_on(line, bare, limit, before, before, None, measured))
    if not modified:
        line.notes += ("Nothing had to be rewritten: written out as a program, the model lets go of values sooner.",)
    result = line.build()
    if after.peak > before.peak and measured is None:
        pipeline.abandon(line)
        return _with_report(model, report_on(line, bare, limit, before, before, None, None))
    verdict = None
    if verify:
        progress("verify")
        with _blaming(bare):  # for whatever shapes alone do not tell
            verdict = _prove(line, result, seed, exact)
    report = report_on(line, result, limit, before, line.attributed(), verdict, measured)
    pipeline.with_hooks_of(model, result)
    return _with_report(result, report)


def measure(
    model: nn.Module,
    example_inputs: Any,
    *,
    example_kwargs: dict[str, Any] | None = None,
    optimizer: Optimizer = "adamw",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    steps: int = 10,
    compiled: bool = False,
) -> Measured:
    """What a step of ``model`` really takes where it lies: peak bytes, bytes after each phase, milliseconds.

    The arguments are those of ``optimize``; ``model`` may be what that returned, or any module. Two steps are taken for
    the bytes and ``steps`` more for the time; afterwards everything is as it was. On the CPU every storage is tracked,
    on CUDA the allocator's own counters are read: there, what ran before in the process may have fragmented memory,
    which ``memrewrite measure`` avoids by a fresh process for each model. ``compiled=True`` measures what
    ``torch.compile`` makes of the model, which takes CUDA.
    Raises ``MeasurementError`` when memory runs out or compiling fails, ``UsageError`` for arguments that cannot be
    meant.
    """
    step = make_step(model, optimizer, loss_fn, amp, mode, micro_batches, loop)
    return measuring.measure(model, _inputs(example_inputs, example_kwargs), step, steps=steps, compiled=compiled)


def verify(
    original: nn.Module,
    rewritten: nn.Module,
    example_inputs: Any,
    *,
    example_kwargs: dict[str, Any] | None = None,
    optimizer: Optimizer = "adamw",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    exact: bool = False,
    steps: int = 3,
    seed: int = 0,
) -> Verdict:
    """Whether ``rewritten`` takes the same training steps as ``original``; a difference is a verdict, not an error.

    The arguments are those of ``optimize``. Over ``steps`` steps, outputs, loss, gradients, buffers, random state and
    flags are compared: with ``exact`` each must have the same bits, else its error against a float64 reference may be
    no larger than the original's own (``memrewrite.equivalence.compare`` has the rule). Afterwards both models are as
    they were. Raises ``MeasurementError`` when nothing could be verified, ``UsageError`` for arguments that cannot be
    meant, and what the original itself raises.
    """
    if original.training != rewritten.training:
        raise UsageError("One model is in train mode and the other is not; call train() or eval() on both.")
    step = make_step(original, optimizer, loss_fn, amp, mode, micro_batches, loop)
    inputs = _inputs(example_inputs, example_kwargs)
    check_seed(seed)
    return verifying.verify(original, rewritten, inputs, step, exact=exact, steps=steps, seed=seed)


def simulate_original(
    model: nn.Module, inputs: Inputs, step: Step, workspace: int, *, attribute: bool = False, probe: bool = True
) -> Timeline:
    """The timeline of the model as it is, by ``measuring.predict``.

    Raises ``CaptureError`` where the model itself fails on the inputs.
    """
    with _blaming(model):
        return predict(model, inputs, step, workspace_bytes=workspace, attribute=attribute, probe=probe)


@contextmanager
def _blaming(model: nn.Module) -> Iterator[None]:
    """Let what the model itself raises on the example inputs be a ``CaptureError`` that says so."""
    try:
        yield
    except MemrewriteError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        raise CaptureError(
            f"{type(model).__name__} fails on the example inputs with {type(error).__name__}: {reason}; "
            "give inputs that the model takes."
        ) from error


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any], Tensor] | None,
    amp: str | torch.dtype | None,
    mode: Literal["train", "inference"] | None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
) -> Step:
    """The step that the arguments of ``optimize`` and the like mean.

    Raises ``UsageError`` for names and numbers that mean nothing, and for a mode the model is not in.
    """
    if micro_batches < 1:
        raise UsageError(f"A step cannot take {micro_batches} micro-batches; give at least 1.")
    now: Literal["train", "inference"] = "train" if model.training else "inference"
    if mode is not None and mode != now:
        raise UsageError(f"The model is in {now} mode; call model.{'train' if mode == 'train' else 'eval'}() first.")
    if now == "train" and not any(p.requires_grad for p in model.parameters()):
        raise UsageError("No parameter requires a gradient, so there is no training step; call model.eval() first.")
    if isinstance(optimizer, str):
        factory = optimizer_factory(optimizer)
    else:
        factory = optimizers_like(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    kind = amp_dtype(amp) if isinstance(amp, str) else amp
    return Step(now, factory, loss_fn, kind, micro_batches=micro_batches, loop=Loop.parse(loop))


def _inputs(args: Any, kwargs: dict[str, Any] | None) -> Inputs:
    return Inputs(args if isinstance(args, tuple) else (args,), kwargs or {})


def _refuse_replaced(model: nn.Module) -> None:
    """Raise ``UsageError`` where forward is not the class's own, ``CaptureError`` where a hook sets its weight."""
    if "forward" in vars(model):
        raise UsageError("The model's forward was replaced on the object; define it in the model's class instead.")
    if hasattr(type(model), "_memrewrite"):
        raise UsageError("The model is already optimized; optimize the original again with the new budget.")
    refuse_weight_hooks(model, type(model).__name__)  # which a capture does not see


def _prove(line: pipeline.Line, result: nn.Module, seed: int, exact: bool) -> Verdict:
    """Verify against the original; where arithmetic changed, also bit for bit against the program without segments.

    That a rewrite computes in pieces what the device computes at once shows in the bits: if not all are the same, it
    has changed the arithmetic there, and so has a capture that takes a way of its own.
    """
    changed = line.arithmetic_changed
    verdict = verifying.verify(line.model, result, line.inputs, line.step, exact=not changed, seed=seed)
    in_pieces = any(name in registry.SLOWER and found.modified for name, found in line.results.items())
    if not (verdict.equivalent or changed or exact) and (in_pieces or not line.captured_exactly):
        changed = True
        verdict = verifying.verify(line.model, result, line.inputs, line.step, exact=False, seed=seed)
    segmented = line.results.get("checkpoint_segments")
    if verdict.equivalent and changed and segmented and segmented.modified:
        restore = pipeline.without_segments(line)
        plain = line.build()
        restore()
        segments = verifying.verify(plain, result, line.inputs, line.step, exact=True, seed=seed)
        if not segments.equivalent:
            verdict = segments
    if not verdict.equivalent:
        done = ", ".join(name for name, r in line.results.items() if r.modified)
        notes = "".join(f" {note}" for note in line.notes)
        advice = " exact=True leaves out the rewrites that change the arithmetic." if line.arithmetic_changed else ""
        raise NotEquivalentError(f"The rewritten model is not equivalent ({done}): {verdict.summary}.{notes}{advice}")
    return verdict


def _with_report(module: nn.Module, report: Report) -> OptimizedModule:
    attach(module, report)
    return cast(OptimizedModule, module)


def _as_cuda(wanted: str | torch.device | None, here: torch.device) -> bool:
    """Whether to plan for CUDA without it; raises ``UsageError`` where the model does not lie on ``wanted``."""
    try:
        kind = here.type if wanted is None else torch.device(wanted).type
    except RuntimeError as error:
        raise UsageError(f"Device {wanted!r} is unknown; give cpu or cuda.") from error
    if kind == here.type:
        return False
    if (kind, here.type) == ("cuda", "cpu") and not torch.cuda.is_available():
        return True
    raise UsageError(f"The model is on {here}, not on {wanted}; move it and its inputs there, or leave out device.")
