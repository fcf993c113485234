"""What ``optimize`` is asked for besides the workload."""

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from memrewrite.capture.at_sight import refuse_weight_hooks
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Fsdp
from memrewrite.records.options import Budget, check_passes, check_seed
from memrewrite.records.ranges import Range, Ranges, parse_ranges
from memrewrite.runtime.dropin import Returns
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.eager import EAGER, Target
from memrewrite.torch_internals.fsdp import units
from memrewrite.workload.ranges import enlarged
from memrewrite.workload.sharding import refuse_compiled, refuse_sharded
from memrewrite.workload.step import Step, device_of
from memrewrite.workload.workload import Workload, refuse_scripted


@dataclass(frozen=True)
class Request:
    """The arguments of ``optimize`` of the same names; ``names`` are the passes that are allowed, None for all."""

    budget: str | int | Budget | None = None
    reserved: bool = False
    device: str | torch.device | None = None
    regions: Sequence[str] | None = None
    names: tuple[str, ...] | None = None
    exact: bool = False
    compiled: bool = False
    verify: bool = True
    strict: bool = False
    seed: int = 0
    dynamic: Ranges | None = None
    returns: Returns = "all"

    def check(self, model: nn.Module) -> None:
        """Raise ``UsageError`` for what cannot be meant, and what refuses the model as it is."""
        check_passes(self.names)
        check_seed(self.seed)
        if self.returns not in ("all", "lazy", "loss"):
            raise UsageError(f"returns={self.returns!r} is unknown; give 'all', 'lazy' or 'loss'.")
        if self.returns == "lazy" and self.compiled:
            raise UsageError("Compiled code makes all that it returns; give returns='loss' or 'all', or no compiled.")
        if self.strict and self.budget is None:
            raise UsageError("strict refuses calls that a budget does not hold for; give a budget.")
        if self.ranges and self.regions is not None:
            raise UsageError(
                "dynamic is for inputs of the whole model, which regions are parts of; give one of the two."
            )
        if isinstance(self.regions, str) or (self.regions is not None and not self.regions):
            raise UsageError(f'regions={self.regions!r} is no list of patterns; give regions=["layers.*"] say.')
        refuse_compiled(model)
        refuse_scripted(model)
        _refuse_replaced(model)
        refuse_sharded(model)

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """The sizes that vary."""
        return parse_ranges(self.dynamic)

    def placed(self, work: Workload) -> tuple[Workload, tuple[Range, ...]]:
        """The workload on the device that it is planned for, at the largest sizes, and all ranges of sizes."""
        if self.compiled and work.step.mesh is not None:
            raise UsageError("What torch.compile makes of a model in a mesh is not known; leave out compiled or mesh.")
        if self.compiled and work.step.in_backward:
            raise UsageError(
                "What torch.compile makes of backward gives all gradients as it ends, so that no step is taken while "
                "it runs; leave out compiled, or take the optimizer's step as a whole."
            )
        target = _target(self.device, device_of(work.model, work.inputs))
        inputs, ranges = enlarged(work.model, work.inputs, self.ranges)
        return replace(work, inputs=inputs, step=replace(work.step, target=target)), ranges

    def regions_in(self, work: Workload) -> Sequence[str] | None:
        """The parts to capture one by one: those asked for, else the units that will be sharded, whose hooks stay."""
        if self.regions is not None or not isinstance(work.step.mesh, Fsdp):
            return self.regions
        mesh = work.step.mesh
        chosen = {id(unit) for unit in units(work.model, mesh)}
        found = [path for path, part in work.model.named_modules() if id(part) in chosen]
        if not found:
            raise UsageError(f"No part of the model is a unit of {mesh}; name them, units=model.layers.* say.")
        return found

    def rewritten(self, step: Step) -> Step:
        """The step of what the model is rewritten into."""
        return replace(step, target=CompiledTarget(step.target)) if self.compiled else step


def _refuse_replaced(model: nn.Module) -> None:
    """Raise ``UsageError`` where forward is no method, ``CaptureError`` where a hook sets its weight."""
    forward = vars(model).get("forward")
    if forward is not None and "_original_forward" in vars(model):  # read in accelerate 1.15: prepare_model
        raise UsageError(
            f"accelerate's prepare has put autocast into the forward of {type(model).__name__}, where no plan frees "
            "anything; optimize the model before prepare, with amp=."
        )
    if forward is not None and not (isinstance(forward, types.MethodType) and forward.__self__ is model):
        raise UsageError(
            "The model's forward was replaced on the object by something that is no method of it; "
            "give a method (types.MethodType(function, model)), or define it in the model's class."
        )
    if hasattr(type(model), "_memrewrite"):
        raise UsageError("The model is already optimized; optimize the original again with the new budget.")
    refuse_weight_hooks(model, type(model).__name__)  # which a capture does not see


def _target(wanted: str | torch.device | None, here: torch.device) -> Target:
    """Where the step is planned for; raises ``UsageError`` where the model does not lie on ``wanted``."""
    try:
        kind = here.type if wanted is None else torch.device(wanted).type
    except RuntimeError as error:
        raise UsageError(f"Device {wanted!r} is unknown; give cpu or cuda.") from error
    if kind == here.type:
        return EAGER
    if (kind, here.type) == ("cuda", "cpu") and not torch.cuda.is_available():
        return CUDA_FROM_CPU
    raise UsageError(f"The model is on {here}, not on {wanted}; move it and its inputs there, or leave out device.")
