"""``optimize``: capture, observe, rewrite, plan, verify, measure. Each stage lives in a room of its own."""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from memrewrite import pipeline, registry
from memrewrite.advice import infeasible
from memrewrite.coverage import kept
from memrewrite.errors import CaptureError, MemrewriteError, NotEquivalentError, UsageError
from memrewrite.measure import measure, predict
from memrewrite.options import Budget
from memrewrite.plan.facts import chain, compute_nodes
from memrewrite.regions import find
from memrewrite.report.data import Measured, Peaks, Report, Segment, Share, attach
from memrewrite.rewrite import where
from memrewrite.simulate import Timeline
from memrewrite.simulate.workspaces import workspace_bytes
from memrewrite.step import Inputs, Step, device_type
from memrewrite.stepspec import amp_dtype, optimizer_factory
from memrewrite.verify import Verdict
from memrewrite.verify import verify as verify_equal

Optimizer = str | type[torch.optim.Optimizer] | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
_CORRECTIONS = 4  # plans made after the device's own peak was seen


class OptimizedModule(nn.Module):
    """The type of what ``optimize`` returns: a module of the user's own class that carries ``report``."""

    report: Report


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    example_kwargs: dict[str, Any] | None = None,
    budget: str | int | Budget | None = None,
    optimizer: Optimizer = "adamw",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    regions: Sequence[str] | None = None,
    passes: Iterable[str] | None = None,
    exact: bool = False,
    verify: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda stage: None,
) -> "OptimizedModule":
    """A drop-in for ``model`` whose training step peaks within ``budget`` bytes, proved equivalent to it.

    ``example_inputs`` is a tensor or a tuple; ``budget`` text such as ``"8GB"``, ``"60%"`` or ``"min"``, an int of
    bytes or a ``Budget``, and bounds the peak of a steady step: parameters, gradients, optimizer state, inputs,
    activations, temporaries and library workspaces. ``optimizer`` is ``"none"``, ``"sgd"``, ``"sgd-momentum"``,
    ``"adam"``, ``"adamw"``, a ``torch.optim`` class, a factory of one, or None; ``loss_fn(output)`` gives a scalar;
    ``amp`` is ``"bf16"`` or ``"fp16"``; ``mode`` is by default the one the model is in. ``regions`` are patterns of
    submodule paths (``"layers.*"``) to capture one by one, whose own hooks keep firing; by default the whole model is
    captured, else its largest submodules that can be. ``passes`` names those allowed, ``exact`` keeps the forward
    bit-equal. ``verify=False`` returns the result unproved.

    The result shares every Parameter and buffer with ``model``, is an instance of its class, and carries ``.report``
    (where the class has a ``report`` of its own that stays, and ``memrewrite.report_of(result)`` gives ours); where
    nothing was to rewrite, or the rewrites would raise the peak, it is ``model`` itself. ``model`` is left as it is;
    hooks on it are not called meanwhile and work on the result as before. ``progress`` is told each stage.
    Raises ``CaptureError``, ``BudgetInfeasibleError``, ``NotEquivalentError``, ``MeasurementError``, ``UsageError``.
    """
    names = (passes,) if isinstance(passes, str) else None if passes is None else tuple(passes)
    registry.check(names)
    inputs = Inputs(example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), example_kwargs or {})
    step = make_step(model, optimizer, loss_fn, amp, mode)
    bare = pipeline.without_hooks(model)
    limit = None if budget is None else Budget.parse(budget)
    progress("simulate")
    workspace = workspace_bytes(_device(model, inputs), step.amp, step.mode)
    before = simulate_original(bare, inputs, step, workspace)
    progress("capture")
    found = find(bare, inputs, step, regions)
    parts = [pipeline.Part(region, step) for region in found.found]
    line = pipeline.Line(bare, inputs, step, workspace, parts, found.notes, found.left)
    progress("rewrite")
    pipeline.rewrite(line, names, exact)
    measured = None
    if limit is not None:
        progress("plan")
        measured = _meet(line, limit, before.peak, names)
    pipeline.mark_inplace(line, names)
    modified = any(result.modified for result in line.results.values())
    after = line.simulate()
    if not modified and (limit is None or before.peak <= max(limit.resolve(before.peak) or 0, after.peak)):
        return _with_report(model, _report(line, limit, before, before, None, measured))
    if not modified:
        line.notes += ("Nothing had to be rewritten: written out as a program, the model lets go of values sooner.",)
    result = line.build()
    if after.peak > before.peak and measured is None:
        pipeline.abandon(line)
        return _with_report(model, _report(line, limit, before, before, None, None))
    verdict = None
    if verify:
        progress("verify")
        verdict = _prove(line, result, seed)
    pipeline.with_hooks_of(model, result)
    return _with_report(result, _report(line, limit, before, after, verdict, measured))


def simulate_original(model: nn.Module, inputs: Inputs, step: Step, workspace: int) -> Timeline:
    """The timeline of the model as it is; raises ``CaptureError`` where the model itself fails on the inputs."""
    try:
        return predict(model, inputs, step, workspace_bytes=workspace)
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
) -> Step:
    """The step ``optimize``'s arguments mean.

    Raises ``UsageError`` for names that mean nothing, and for a mode the model is not in.
    """
    now: Literal["train", "inference"] = "train" if model.training else "inference"
    if mode is not None and mode != now:
        raise UsageError(f"The model is in {now} mode; call model.{'train' if mode == 'train' else 'eval'}() first.")
    if "forward" in vars(model):
        raise UsageError("The model's forward was replaced on the object; define it in the model's class instead.")
    if hasattr(type(model), "_memrewrite"):
        raise UsageError("The model is already optimized; optimize the original again with the new budget.")
    if now == "train" and not any(p.requires_grad for p in model.parameters()):
        raise UsageError("No parameter requires a gradient, so there is no training step; call model.eval() first.")
    factory = optimizer_factory(optimizer) if isinstance(optimizer, str) else optimizer
    return Step(now, factory, loss_fn, amp_dtype(amp) if isinstance(amp, str) else amp)


def _meet(line: pipeline.Line, limit: Budget, original: int, names: tuple[str, ...] | None) -> Measured | None:
    """Plan until the peak is within the budget; on a GPU, measure, and plan again by what was seen.

    Raises ``BudgetInfeasibleError`` when the lowest reachable peak is above it.
    """
    budget = limit.resolve(original) or 0
    target = budget
    on_cuda = device_type(line.model, line.inputs) == "cuda"
    for _ in range(_CORRECTIONS):
        fitted = pipeline.plan(line, target) if _may_checkpoint(line, names) else pipeline.no_plan(line, target)
        last = not fitted.fits and not limit.minimum
        if last:
            pipeline.mark_inplace(line, names)
            lowest = line.simulate().peak + budget - target
            if lowest > budget and (on_cuda or original > budget):  # else the model fits as it is
                raise infeasible(line, budget, lowest)
        if not on_cuda:
            return None
        measured = measure(line.build(), line.inputs, line.step, steps=3)
        if limit.minimum or measured.peak <= budget:
            return measured
        if last:
            break
        target -= measured.peak - budget
    raise infeasible(line, budget, measured.peak)


def _may_checkpoint(line: pipeline.Line, names: tuple[str, ...] | None) -> bool:
    return line.step.mode == "train" and (names is None or "checkpoint_segments" in names)


def _prove(line: pipeline.Line, result: nn.Module, seed: int) -> Verdict:
    """Verify against the original; where arithmetic changed, also bit for bit against the program without segments."""
    verdict = verify_equal(line.model, result, line.inputs, line.step, exact=not line.arithmetic_changed, seed=seed)
    segmented = line.results.get("checkpoint_segments")
    if verdict.equivalent and line.arithmetic_changed and segmented and segmented.modified:
        restore = pipeline.without_segments(line)
        plain = line.build()
        restore()
        segments = verify_equal(plain, result, line.inputs, line.step, exact=True, seed=seed)
        if not segments.equivalent:
            verdict = segments
    if not verdict.equivalent:
        done = ", ".join(name for name, r in line.results.items() if r.modified)
        notes = "".join(f" {note}" for note in line.notes)
        advice = " exact=True leaves out the rewrites that change the arithmetic." if line.arithmetic_changed else ""
        raise NotEquivalentError(f"The rewritten model is not equivalent ({done}): {verdict.summary}.{notes}{advice}")
    return verdict


def _report(
    line: pipeline.Line,
    limit: Budget | None,
    before: Timeline,
    after: Timeline,
    verdict: Verdict | None,
    measured: Measured | None,
) -> Report:
    config = {
        "budget": None if limit is None else str(limit),
        "mode": line.step.mode,
        "amp": None if line.step.amp is None else str(line.step.amp),
        "front_end": ", ".join(dict.fromkeys(part.region.captured.front_end for part in line.parts)),
        "regions": [part.region.path for part in line.parts],
    }
    return Report(
        model=type(line.model).__name__,
        mode=line.step.mode,
        device=device_type(line.model, line.inputs),
        config=config,
        budget=None if limit is None else limit.resolve(before.peak),
        predicted_before=_peaks(before),
        predicted_after=_peaks(after),
        rewrites=tuple((name, a.where, a.what) for name, r in line.results.items() for a in r.applied),
        refusals=tuple((name, f.where, f.reason) for name, r in line.results.items() for f in r.refused),
        segments=_segments(line),
        equivalent=None if verdict is None else verdict.equivalent,
        verdict="not verified" if verdict is None else verdict.summary,
        measured_after=measured,
        notes=line.notes,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        shares=_shares(line),
    )


def _shares(line: pipeline.Line) -> tuple[Share, ...]:
    regions = {part.region.path: "" for part in line.parts}
    if "" in regions or line.step.mode == "inference":
        return ()
    untouched = {**line.left, **regions}
    found = kept(line.model, line.inputs, line.step, untouched)
    return tuple(Share(path, size, untouched[path]) for path, size in found.items())


def _peaks(timeline: Timeline) -> Peaks:
    return Peaks(timeline.peak, timeline.peak_step1, timeline.phases, timeline.categories)


def _segments(line: pipeline.Line) -> tuple[Segment, ...]:
    return tuple(segment for part in line.parts for segment in _segments_of(part, device_type(line.model, line.inputs)))


def _segments_of(part: pipeline.Part, device: str) -> Iterator[Segment]:
    effects = part.observe()
    nodes = compute_nodes(effects)
    numbers = chain(effects, device, part.step.amp)
    for number in sorted({n.meta["segment"] for n in nodes if "segment" in n.meta}):
        members = [i for i, n in enumerate(nodes) if n.meta.get("segment") == number]
        made = (s for s in numbers.storages if s.saver is not None and members[0] <= s.producer <= members[-1])
        freed = sum(s.bytes for s in made if s.last_use <= members[-1])
        ms = float(numbers.ms[members].sum())
        yield Segment(where(nodes[members[0]]), where(nodes[members[-1]]), len(members), freed, ms)


def _with_report(module: nn.Module, report: Report) -> OptimizedModule:
    attach(module, report)
    return cast(OptimizedModule, module)


def _device(model: nn.Module, inputs: Inputs) -> torch.device:
    for tensor in [*model.parameters(), *inputs.tensors()]:
        return tensor.device
    return torch.device("cpu")
