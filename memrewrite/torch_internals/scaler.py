"""A gradient scaler that shows what it holds. Read in PyTorch 2.11 to 2.15."""

from typing import Any

import torch


class Scaler(torch.amp.GradScaler):
    """A ``GradScaler`` for observing a step: it always lets the optimizer take it, and shows what it holds.

    Public methods ask the device whether a gradient overflowed, which fake tensors cannot answer, and skip the step if
    one did, which would leave its memory unseen. It scales by 1 until one overflows, so that gradients are those of the
    step without it.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=1.0, growth_interval=2**31 - 1)

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The scale and the count of steps without overflow, once it has scaled a loss."""
        return [t for t in (self._scale, self._growth_tracker) if t is not None]
