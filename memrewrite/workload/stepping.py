"""How an optimizer's step is taken: as a whole, in groups of parameters, or while backward runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from memrewrite.records.errors import UsageError
from memrewrite.workload.in_backward import check_in_backward, step_in_backward
from memrewrite.workload.in_groups import InGroups, check_groups, made_whole, making_groups, step_in_groups
from memrewrite.workload.narrowed import Narrowed
from memrewrite.workload.optimizers import AsOne, OptimizerFactory, Optimizers, optimizers_like
from memrewrite.workload.step import Step

How = Literal["whole", "grouped", "in_backward"]
_TOLD = {
    "grouped": "The optimizer's step is planned in groups of 64 MiB of parameters: let yours step so, by "
    "memrewrite.step_in_groups(optimizer).",
    "in_backward": "The optimizer's step is planned while backward runs: let yours step so, by "
    "memrewrite.step_in_backward(optimizer).",
}
_ANOTHER: dict[str, Callable[[Step], bool]] = {
    "those of other micro-batches are added": lambda step: step.micro_batches > 1,
    "a scaler looks at it (loop scaler)": lambda step: step.loop.scaler,
    "it could be filled with zeros (loop zero-in-place)": lambda step: step.loop.zero_grad == "in place",
    "the processes of a mesh put theirs together": lambda step: step.mesh is not None,
}


def factory_like(optimizer: torch.optim.Optimizer) -> OptimizerFactory:
    """``optimizers_like``, also of one that steps in groups; of one that does while backward runs, as a whole."""
    if not isinstance(optimizer, Narrowed):
        return optimizers_like(optimizer)
    factory = optimizers_like(optimizer, optimizer._of)
    return making_groups(factory, optimizer._size) if isinstance(optimizer, InGroups) else factory


def factory_of(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerFactory:
    """``factory_like``, of several as one."""
    if len(optimizers) == 1:
        return factory_like(optimizers[0])
    return AsOne(tuple((factory_like(each), len(each.param_groups)) for each in optimizers))


def stepping(step: Step, model: nn.Module, how: How) -> Step:
    """The same step of ``model``, with the optimizer's own in groups or while backward runs if asked for.

    Raises ``UsageError`` for another way, where there is no such step, and as ``step_in_groups`` and
    ``step_in_backward`` do.
    """
    if how == "whole":
        return step
    if how not in _TOLD:
        raise UsageError(f"optimizer_step={how!r} is unknown; give 'whole', 'grouped' or 'in_backward'.")
    if step.optimizer is None or step.mode == "inference":
        raise UsageError(f"optimizer_step={how!r} is for a training step with an optimizer; leave it out.")
    trained = [p for p in model.parameters() if p.requires_grad]
    made = step.make_optimizer(model)
    if isinstance(made, Optimizers):
        raise UsageError(f"optimizer_step={how!r} is for one optimizer, and there are several; leave it out.")
    grouped = isinstance(made, InGroups)
    if grouped if how == "in_backward" else step.in_backward:
        raise UsageError("An optimizer steps in groups or while backward runs; give one that does not yet.")
    if how == "in_backward":
        if not step.in_backward:
            check_in_backward(step.optimizer, trained)
        return checked(replace(step, in_backward=True))
    if grouped:
        return step
    check_groups(step.optimizer, trained)
    return replace(step, optimizer=making_groups(step.optimizer))


def checked(step: Step) -> Step:
    """The step; raises ``UsageError`` where an optimizer in backward would not take it as one after backward does."""
    if step.in_backward and step.mode == "train" and (why := refused_in_backward(step)):
        raise UsageError(
            f"An optimizer that steps while backward runs has used and freed a gradient before {why}; leave out one "
            "of the two."
        )
    return step


def refused_in_backward(step: Step) -> str | None:
    """What an optimizer that steps while backward runs has not waited for; None where there is nothing."""
    return next((words for words, is_so in _ANOTHER.items() if is_so(step)), None)


def told(step: Step) -> str | None:
    """What to do with the user's optimizer, for a step that takes it otherwise than as a whole."""
    if step.in_backward:
        return _TOLD["in_backward"]
    return None if made_whole(step.optimizer)[1] is None else _TOLD["grouped"]


def let_step(optimizer: object, step: Step) -> str | None:
    """Let an optimizer that was given step as planned; what to do where a name or a factory was."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return told(step)
    if step.in_backward:
        step_in_backward(optimizer)
    elif told(step) is not None:
        step_in_groups(optimizer)
    return None
