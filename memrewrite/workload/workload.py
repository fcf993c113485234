"""What a call of ``optimize``, ``estimate``, ``measure`` or ``verify`` is about: a model, its inputs and its step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.records.loop import TUTORIAL, Loop
from memrewrite.records.mesh import Mesh
from memrewrite.workload.in_backward import InBackward
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepping import checked, factory_like
from memrewrite.workload.stepspec import amp_dtype, in_backward, optimizer_factory

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Optimizer = str | torch.optim.Optimizer | type[torch.optim.Optimizer] | Factory | None
Mode = Literal["train", "inference"] | None


@dataclass(frozen=True)
class Workload:
    """A model and the step that it takes on these inputs."""

    model: nn.Module
    inputs: Inputs
    step: Step


def workload(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: dict[str, Any] | None,
    optimizer: Optimizer,
    loss_fn: Callable[[Any], Tensor] | None,
    amp: str | torch.dtype | None,
    mode: Mode,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    mesh: Mesh | None = None,
) -> Workload:
    """The workload that the arguments of ``optimize`` and the like mean.

    Raises ``UsageError`` for names and numbers that mean nothing, and for a mode the model is not in.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    step = make_step(model, optimizer, loss_fn, amp, mode, micro_batches, loop, mesh)
    return Workload(model, Inputs(args, example_kwargs or {}), step)


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any], Tensor] | None,
    amp: str | torch.dtype | None,
    mode: Mode,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    mesh: Mesh | None = None,
) -> Step:
    """The step of a ``workload``."""
    if micro_batches < 1:
        raise UsageError(f"A step cannot take {micro_batches} micro-batches; give at least 1.")
    now: Literal["train", "inference"] = "train" if model.training else "inference"
    if mode is not None and mode != now:
        raise UsageError(f"The model is in {now} mode; call model.{'train' if mode == 'train' else 'eval'}() first.")
    if now == "train" and not any(p.requires_grad for p in model.parameters()):
        raise UsageError("No parameter requires a gradient, so there is no training step; call model.eval() first.")
    while_backward = in_backward(optimizer) if isinstance(optimizer, str) else isinstance(optimizer, InBackward)
    if isinstance(optimizer, str):
        factory = optimizer_factory(optimizer)
    else:
        factory = factory_like(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    kind = amp_dtype(amp) if isinstance(amp, str) else amp
    mesh = mesh.in_inference if mesh is not None and now == "inference" else mesh
    how: dict[str, Any] = {"micro_batches": micro_batches, "loop": Loop.parse(loop), "mesh": mesh}
    return checked(Step(now, factory, loss_fn, kind, in_backward=while_backward, **how))
