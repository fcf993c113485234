"""One verification under way: the models, the step that they take, and what is kept of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from memrewrite.equivalence.compare import HALF, Comparison
from memrewrite.equivalence.reference import FusedRandomnessError
from memrewrite.equivalence.trial import Kept, Key, Record, input_name, on_device, take_step
from memrewrite.measurement.snapshot import State
from memrewrite.runtime.differences import joined
from memrewrite.runtime.dropin import accept, programs
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.workload.step import Inputs, Step, autocast, device_type


class OriginalError(Exception):
    """The original model raised; the cause says what."""


class RewrittenError(Exception):
    """The rewritten model raised; the cause says what."""


class TooLargeError(Exception):
    """The reference does not fit in device memory, wherever results are kept."""


@dataclass(frozen=True)
class Case:
    """Two models and how they are compared.

    ``plain``, if there is one, is the model whose bits the rewritten one must have, whatever the original's are.
    ``known`` is what float64 left to each value when the two were compared before (``Verdict.room``).
    ``avoid`` are the families of fused random operators that are known to stand in the way of a reference, at any size,
    ``unfit`` the classes of blocks that may not run again in one, ``too_large`` the sizes of inputs at which one is too
    large unless blocks do; ``idle`` the numbers of inputs that the original gives no gradient, as it drops a mask that
    masks nothing: a program has it, and kernels do otherwise where a mask requires a gradient.
    The optimizer of the rewritten model steps ``in_backward``: then gradients are not compared.
    Results stay on the device where they are to be ``near``, those of one step at a time if ``step_by_step``.
    """

    original: nn.Module
    rewritten: nn.Module
    inputs: Inputs
    step: Step
    steps: int
    seed: int
    devices: tuple[torch.device, ...]
    plain: nn.Module | None = None
    known: Mapping[Key, float] = field(default_factory=dict)
    input_gradients: bool = True
    avoid: set[str] = field(default_factory=set)
    unfit: set[type] = field(default_factory=set)
    too_large: set[tuple[torch.Size, ...]] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    near: bool = True
    step_by_step: bool = False
    in_backward: bool = False

    @cached_property
    def kept(self) -> Kept:
        """What is compared of a step."""
        found = programs(self.rewritten)
        return Kept(
            outputs=all(program.returns != "loss" for program in found.values()),
            near=self.near,
            gradients="spent" if self.in_backward else "copied",
            held=tuple((joined(region, path), name) for region in found for path, name in found[region].holds),
        )

    @property
    def rewritten_step(self) -> Step:
        """The step of the rewritten model."""
        return replace(self.step, in_backward=self.in_backward)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """All of them."""
        return (self.original, self.rewritten, *([] if self.plain is None else [self.plain]))

    def optimized_alike(self) -> bool:
        """Whether the optimizer gets the same parameters of both: then from the same gradients it makes the same."""
        of_each = ([id(p) for p in model.parameters() if p.requires_grad] for model in self.models)
        return len(set(map(tuple, of_each))) == 1

    def of(self, original: nn.Module) -> "Case":
        """The same with another model in the place of the original."""
        return replace(self, original=original, plain=None)

    def beside(self, record: Record) -> "Case":
        """The same with results where those of ``record`` lie."""
        return self if on_device(record) or not self.devices else replace(self, near=False)

    def comparison(self) -> Comparison:
        """One of which nothing is known yet."""
        half = self.step.amp in HALF or any(p.dtype in HALF for p in self.original.parameters())
        return Comparison(half, next(iter(self.devices), torch.device("cpu")))

    def keep(self) -> State:
        """All that a step may change, as it is now."""
        changed = self.step.targets(self.original, self.inputs).changing
        return State(self.models, self.devices, changed, self.step.loss_fn, near=self.near)

    def run_original(self, optimizer: torch.optim.Optimizer | None, parameters: bool = True) -> Record:
        """One step of the original."""
        kept = replace(self.kept, parameters=parameters, idle=frozenset(self.idle))
        how = self.devices, self.input_gradients, kept
        try:
            record = take_step(self.original, self.inputs, self.step, optimizer, *how)
        except (torch.OutOfMemoryError, FusedRandomnessError):
            raise
        except Exception as error:
            raise OriginalError from error
        numbers = range(len(self.inputs.tensors()))
        self.idle.update(n for n in numbers if record.get(("input gradient", input_name(n)), ...) is None)
        return record

    def run_rewritten(self, optimizer: torch.optim.Optimizer | None) -> Record:
        """One step of the rewritten model."""
        if (reason := self.why_not_run()) is not None:
            raise RewrittenError from FallbackWarning(reason)
        how = self.devices, self.input_gradients, replace(self.kept, idle=frozenset(self.idle))
        try:
            return take_step(self.rewritten, self.inputs, self.rewritten_step, optimizer, *how)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RewrittenError from error

    def why_not_run(self) -> str | None:
        """Why a drop-in would run its original forward, which would compare the original with itself."""
        program = getattr(type(self.rewritten), "_memrewrite", None)
        if program is None:
            return None
        device = device_type(self.rewritten, self.inputs)
        with torch.set_grad_enabled(program.differentiable), autocast(self.step.amp, device):
            tensors, reason = accept(program, self.rewritten, self.inputs.args, self.inputs.kwargs)
        return None if tensors is not None else reason or "it was captured in the other of train and eval mode"
