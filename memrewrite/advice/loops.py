"""Other training loops than the step a budget speaks of, for simulating what they take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.step import Inputs, Phase, Step, autocast, default_loss, device_type


@dataclass(frozen=True)
class Careless(Step):
    """A loop whose variables hold the last output and loss until the next are there, and that fills gradients with 0.

    That is ``output = model(x); loss = ...`` in a loop without ``del``, with ``zero_grad(set_to_none=False)``.
    """

    held: list[Any] = field(default_factory=list, compare=False)

    def run(
        self,
        module: nn.Module,
        inputs: Inputs,
        optimizer: torch.optim.Optimizer | None,
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> Tensor | None:
        """One step of that loop."""
        on_phase("data")
        with autocast(self.amp, device_type(module, inputs)):
            output = module(*inputs.args, **inputs.kwargs)
            on_phase("forward")
            self.held[:] = [output, *self.held[1:]]
            loss = (self.loss_fn or default_loss)(output)
            on_phase("loss")
        self.held[:] = [output, loss]
        loss.backward()
        on_phase("backward")
        if optimizer is not None:
            optimizer.step()
        on_phase("step")
        (module if optimizer is None else optimizer).zero_grad(set_to_none=False)
        return None
