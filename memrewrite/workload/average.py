"""The average of a model's weights that a training loop may keep."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """A moving average of a module's parameters, with its buffers: the tensors of ``swa_utils.AveragedModel``.

    ``tensors`` are a copy of each parameter and buffer, and the number of updates.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters, self._buffers = list(module.parameters()), list(module.buffers())
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        self._copies = [buffer.detach().clone() for buffer in self._buffers]
        place = next((t.device for t in (*self._parameters, *self._buffers)), torch.device("cpu"))
        self._updates = torch.zeros((), dtype=torch.long, device=place)
        self._move = get_ema_multi_avg_fn()

    @property
    def of_parameters(self) -> list[Tensor]:
        """The copies of parameters, which lie where these do."""
        return self._averages

    @property
    def tensors(self) -> list[Tensor]:
        """All that it keeps."""
        return [*self._averages, *self._copies, self._updates]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the module as it is; buffers are copied."""
        kinds: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            kinds[parameter.device, parameter.dtype].append((average, parameter.detach()))
        for pairs in kinds.values():
            self._move([average for average, _ in pairs], [now for _, now in pairs], self._updates)
        for copied, buffer in zip(self._copies, self._buffers, strict=True):
            copied.copy_(buffer)
        self._updates += 1
