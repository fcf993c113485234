"""What a strided tensor is besides its values."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


def strides_between(tensor: Tensor) -> tuple[int, ...]:
    """The strides of dimensions of more than one element, in order: those of others lead nowhere."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


@dataclass(frozen=True)
class TensorLike:
    """A tensor's sizes, strides in elements, type and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device | None = None) -> Self:
        """That of ``tensor``, which stands for one on ``device`` if that is given."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device if device is None else device)

    @property
    def extent(self) -> int:
        """How many elements there are from the first to the last, in memory."""
        spans = [(size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)]
        return 0 if 0 in self.shape else 1 + sum(spans)

    def empty(self) -> Tensor:
        """A tensor like it, of whatever values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def filled(self, value: float) -> Tensor:
        """A tensor like it all of whose memory is ``value``; elements may share memory."""
        return self.over(torch.full((self.extent,), value, dtype=self.dtype, device=self.device))

    def over(self, memory: Tensor) -> Tensor:
        """A tensor like it whose memory is ``memory``, of as many elements as its extent."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(
            memory.untyped_storage(), 0, self.shape, self.stride
        )
