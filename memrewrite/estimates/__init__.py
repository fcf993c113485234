"""Will it fit? What a step takes, of what, in which modules, and with which batch it fits: all on fake tensors.

Nothing is allocated on a device, also where there is one: a step for CUDA is simulated for it on the CPU.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memrewrite import advice
from memrewrite.advice.known import Known
from memrewrite.estimates import modules, textbook
from memrewrite.estimates.batches import largest
from memrewrite.measurement.original import simulate_original
from memrewrite.process.turns import one_at_a_time
from memrewrite.records.errors import CaptureError, UsageError
from memrewrite.records.estimate import Difference, Estimate, Largest, ModuleShare, Peak, Textbook
from memrewrite.records.loop import TUTORIAL, Loop
from memrewrite.records.mesh import Fsdp, Mesh, Tp
from memrewrite.records.options import Budget, device_bytes, format_bytes
from memrewrite.records.outcomes import Option
from memrewrite.runtime.dropin import programs
from memrewrite.simulate import ACTIVATIONS, Timeline, habits
from memrewrite.simulate.fake.batch import at_batch
from memrewrite.simulate.fake.fakes import put_back
from memrewrite.targets.allocator import UNSPLIT
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU, STATED_ERROR
from memrewrite.targets.eager import EAGER, Target
from memrewrite.targets.workspaces import library_bytes
from memrewrite.torch_internals.logs import quiet
from memrewrite.workload.hooks import without_hooks
from memrewrite.workload.sharding import refuse_compiled, refuse_sharded, unwrapped
from memrewrite.workload.step import Inputs, Step, evaluating
from memrewrite.workload.workload import Optimizer, refuse_laid_out, refuse_scripted, workload

__all__ = ["Difference", "Estimate", "Largest", "ModuleShare", "Peak", "Textbook", "estimate"]

_MOST = 13  # powers of two that a mesh may be of
_AS_CUDA = f"The figures are predicted for CUDA without using it; {STATED_ERROR}. "
_UNKNOWN = "What operators take while they run, such as convolution workspaces, is not in the figures."


@one_at_a_time
def estimate(
    model: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: dict[str, Any] | None = None,
    optimizer: Optimizer = "adamw",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    mesh: str | Mesh | None = None,
    device: str | torch.device | None = None,
    device_memory: str | int | Budget | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Estimate:
    """What a step of ``model`` takes, before it is run; the arguments are those of ``memrewrite.optimize``.

    ``mesh`` may be tensor parallel besides (``"tp=8"``, ``"fsdp=64,tp=8"``), by the plan of the model. ``device`` is
    where the step would run: by default where the model lies; ``"cuda"`` for a model on the CPU, whether
    there is CUDA or not. Parameters and inputs may lie on the meta device, which stands for the CPU: a model too large
    for this machine is made under ``torch.device("meta")``. ``device_memory`` (``"8GB"``, ``"7.5GiB"``, an int of
    bytes) is what the step has: then the largest batches that fit are looked for and, where this one does not, what
    else would. The model and the random state stay as they are, and no device is used; only a step whose course
    depends on values is taken for real, on the CPU.
    Raises ``CaptureError`` where the model fails on the inputs, ``DataDependentError`` where such a step is for CUDA,
    ``UsageError``, and what ``measure.predict`` raises.
    """
    given, (model, of_mesh) = model, unwrapped(model, mesh)
    refuse_compiled(model)
    refuse_scripted(model)
    if programs(model):  # the copy of it that is simulated would run the original
        raise UsageError("The model is already optimized: its report has the figures, memrewrite.measure takes them.")
    work = workload(
        model, example_inputs, example_kwargs, optimizer, loss_fn, amp, mode, micro_batches, loop, of_mesh, given
    )
    refuse_laid_out(work.inputs, model)
    wanted, target = _planned_for(model, work.inputs, device)
    refuse_sharded(model)
    memory = None if device_memory is None else device_bytes(device_memory)
    step = replace(work.step, target=target)
    divided = isinstance(of_mesh, Fsdp | Tp) and of_mesh.applied
    bare = model if divided else without_hooks(model)  # which divide its inputs
    look = _Look(bare, work.inputs, step, library_bytes(step.mode) if wanted == "cuda" else 0)
    inference = look if step.mode == "inference" else look.inference(wanted)
    progress("simulate")
    with work.context, put_back(step.targets(model, work.inputs).buffers):
        timeline = look.timeline(attribute=True)
        found = _found(model, look, timeline, inference, wanted)
        return found if memory is None else _fitted(found, look, timeline, inference, memory, progress)


def _planned_for(model: nn.Module, inputs: Inputs, device: str | torch.device | None) -> tuple[str, Target]:
    """The type of the device that the step would run on, and where it is simulated."""
    here = next((t.device.type for t in [*model.parameters(), *inputs.tensors()] if not t.is_meta), "cpu")
    wanted = here if device is None else _kind(device)
    if here == "cuda" and wanted != here:
        raise UsageError("The model is on cuda; leave out device, or move the model and its inputs to the CPU.")
    return wanted, CUDA_FROM_CPU if wanted != here else EAGER


def _found(model: nn.Module, look: "_Look", timeline: Timeline, inference: "_Look", wanted: str) -> Estimate:
    """What a step takes, of ``model``, whose ``timeline`` is what ``look`` simulates for the device ``wanted``."""
    step, batch = look.step, look.inputs.batch_size
    alone = look.dropping() or look  # whose forward keeps nothing but what backward needs
    kept = timeline if alone is look else alone.timeline(attribute=True)
    more = alone.at(2 * batch).attempt(attribute=True) if batch else None
    counted = textbook.count(look.model, look.inputs, step)
    rule = textbook.rule(look.model, look.inputs, step, batch, counted)
    sharded = isinstance(step.mesh, Fsdp)  # as is inference then, in a way of its own
    evaluated = timeline if inference is look else None if sharded else inference.attempt()
    without = _AS_CUDA if step.target is CUDA_FROM_CPU else ""
    return Estimate(
        model=type(model).__name__,
        mode=step.mode,
        device=wanted,
        batch_size=batch or None,
        peak=_peak(timeline),
        inference_peak=None if evaluated is None else evaluated.peak,
        modules=modules.shares(model, timeline, kept, (batch, more) if more else None),
        textbook=rule,
        differences=textbook.differences(rule, timeline, counted, step),
        loop=str(step.loop),
        mesh=None if step.mesh is None else str(step.mesh),
        habits=habits.costs(step, timeline, lambda other: look.of(other).peak()),
        notes=() if wanted == "cpu" else (f"{without}{_UNKNOWN}",),
    )


@dataclass(frozen=True)
class _Look:
    """A model whose steps are simulated, with ``workspace`` bytes of libraries throughout."""

    model: nn.Module
    inputs: Inputs
    step: Step
    workspace: int
    known: Known = field(default_factory=Known)

    def timeline(self, attribute: bool = False) -> Timeline:
        """Raises what ``simulate_original`` raises."""
        with evaluating(self.model) if self.step.mode == "inference" else nullcontext():
            found = simulate_original(
                self.model, self.inputs, self.step, self.workspace, attribute=attribute, probe=False
            )
        self.known.add(self.step, self.inputs, found.peak)
        return found

    def attempt(self, attribute: bool = False) -> Timeline | None:
        """The timeline, None where the model does not take these inputs."""
        try:
            with quiet():
                return self.timeline(attribute)
        except CaptureError:
            return None

    def at(self, batch_size: int) -> "_Look":
        """The same with another batch size."""
        return replace(self, inputs=at_batch(self.inputs, batch_size))

    def peak(self) -> int:
        """The peak, simulated once; raises what ``timeline`` raises."""
        known = self.known.of(self.step, self.inputs)
        return self.timeline().peak if known is None else known

    def peak_at(self, batch_size: int) -> int | None:
        """The peak with that batch size, None where the step fails."""
        try:
            return self.at(batch_size).peak()
        except CaptureError:
            return None

    def of(self, step: Step) -> "_Look":
        """The same with another step."""
        return replace(self, step=step)

    def dropping(self) -> "_Look | None":
        """The same in a loop that lets go of the output before backward; None where this one does."""
        loop = self.step.loop
        if self.step.mode == "inference" or not loop.keeps_output:
            return None
        return self.of(replace(self.step, loop=replace(loop, keeps_output=False)))

    def inference(self, device: str) -> "_Look":
        """The same in eval mode under ``no_grad``."""
        mesh = self.step.mesh and self.step.mesh.in_inference
        step = replace(self.step, mode="inference", optimizer=None, loss_fn=None, mesh=mesh)
        return replace(self, step=step, workspace=library_bytes("inference") if device == "cuda" else 0)


def _fitted(
    found: Estimate,
    look: _Look,
    timeline: Timeline,
    inference: _Look,
    memory: int,
    progress: Callable[[str], None],
) -> Estimate:
    """The estimate with what it says about ``memory`` bytes."""
    fits = found.peak.bytes <= memory
    batch = found.batch_size or 0
    progress("largest batch")
    sizes = [_largest(look, memory, batch, found.peak.bytes)]
    if inference is not look and not isinstance(look.step.mesh, Fsdp):
        sizes.append(_largest(inference, memory, batch, found.inference_peak))
    others: tuple[Option, ...] = ()
    if not fits:
        progress("options")
        workspaces: dict[str, int] = {each.step.mode: each.workspace for each in (inference, look)}
        if found.inference_peak is not None:  # simulated without what a forward alone has no use for
            look.known.add(replace(look.step, mode="inference"), look.inputs, found.inference_peak)
        known: dict[str, Any] = {"known": look.known, "passes": timeline.peak_of_passes}
        variants = advice.Variants(look.model, look.inputs, look.step, workspaces, probe=False, **known)
        others = advice.options(variants, memory, found.peak.bytes)
    notes = (*found.notes, *_smallest_mesh(look, timeline, memory, progress))
    return replace(found, device_memory=memory, fits=fits, largest=tuple(sizes), options=others, notes=notes)


def _smallest_mesh(look: _Look, timeline: Timeline, memory: int, progress: Callable[[str], None]) -> Iterator[str]:
    """How many processes are enough, where parameters are spread over them: more have less each."""
    mesh = look.step.mesh
    if not isinstance(mesh, Fsdp) or mesh.applied:  # which has its device mesh
        return
    progress("smallest mesh")

    def peak(exponent: int) -> int:
        of_size = replace(mesh, size=2**exponent, reshard=bool(mesh.reshard))  # which parts might not divide
        return look.of(replace(look.step, mesh=of_size)).peak()

    beside = f",tp={mesh.tp}" if mesh.tp > 1 else ""
    hopeless = _in_any_mesh(timeline) > memory
    enough = _MOST if hopeless else bisect_left(range(_MOST), True, key=lambda exponent: peak(exponent) <= memory)
    if enough == _MOST:
        yield f"No mesh of up to fsdp={2 ** (_MOST - 1)}{beside} fits {format_bytes(memory)} on each device."
    else:
        yield (
            f"The smallest mesh of a power of two that fits is fsdp={2**enough}{beside}, with "
            f"{format_bytes(peak(enough))} on each device."
        )


def _in_any_mesh(timeline: Timeline) -> int:
    """Bytes of activations at the peak, as many however parameters are spread, without what rounds their blocks."""
    living = timeline.living(timeline.peak_event)
    return sum(max(life.bytes - UNSPLIT, 0) for life in living if life.category == ACTIVATIONS)


def _largest(look: _Look, memory: int, batch: int, once: int | None) -> Largest:
    twice = look.peak_at(2 * batch) if batch else None
    if once is None or twice is None:
        return Largest(look.step.mode, None, None, (), "no other batch size could be simulated")
    return largest(look.step.mode, memory, {batch: once, 2 * batch: twice}, look.peak_at)


def _peak(timeline: Timeline) -> Peak:
    label = timeline.events[timeline.peak_event][1]
    phase, _, operator = label.removeprefix("step 2 ").partition(": ")
    place = timeline.modules[timeline.peak_event]
    ended = phase.removesuffix(" ends")
    return Peak(timeline.peak, timeline.categories, ended, operator, place, timeline.reserved)


def _kind(device: str | torch.device) -> str:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"Device {device!r} is unknown; give cpu or cuda.") from error
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"Device {device!r} is not supported; give cpu or cuda.")
    return kind
