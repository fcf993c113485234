"""What makes an output of a program until that is made, of tensors as they were then.

This file needs torch only, because its text is also pasted into generated models.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from memrewrite.runtime.cross_entropy import in_autocast


class OutputSource:
    """Calls ``make`` of the tensors ``of``, whose ``names`` are told where they have changed since."""

    def __init__(
        self,
        make: Callable[..., Tensor],
        of: Sequence[Tensor],
        names: Sequence[str],
        shape: torch.Size,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        promise: Any,
    ) -> None:
        self.make, self.names, self.autocast, self.promise = make, names, autocast, promise
        self.shape, self.dtype = shape, dtype
        # These stay as they are where ``.data`` is set; products of what needs a gradient run by other kernels.
        self.of = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in of]
        self.versions = [tensor._version for tensor in of]
        self.samples = [_sample(tensor) for tensor in self.of[1:]]
        self.made: Tensor | None = None
        self.lost: list[Any] = []  # the shapes of those, casts of the output among them, whose loss was made by rows
        self.output: TensorWeakRef | None = None  # the one that was made by this first: it has the gradient

    def then(self, change: Callable[[Tensor], Tensor], shape: torch.Size, dtype: torch.dtype) -> "OutputSource":
        """The same for what ``change`` makes of the output, a copy: writes to the output do not change it."""
        changed = copy.copy(self)
        changed.make, changed.output = lambda *of: change(self.make(*of)), None
        changed.shape, changed.dtype = shape, dtype
        return changed

    @property
    def held(self) -> list[Tensor]:
        """The tensors that stay because of it."""
        return [*self.of, *self.samples] if self.made is None else [self.made]

    def get(self) -> Tensor:
        """The output, which is made now if it is not there."""
        if self.made is None:
            self.refuse_changed()
            size = self.shape.numel() * self.dtype.itemsize
            self.promise.tell_of_output(tuple(self.shape), size, _levels())
            self.made = self._make()
            self.of, self.samples = [], []
        return self.made

    def apart(self) -> Tensor:
        """The output, which is made apart if it is not there."""
        if self.made is not None:
            return self.made
        self.refuse_changed()
        return self._make()

    def _make(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), in_autocast(self.of[0], self.autocast):
            return self.make(*self.of)

    def refuse_changed(self) -> None:
        """Raise where one of the tensors has changed, so that the output cannot be made any more."""
        samples = [self.of[0][:0], *self.samples]
        for name, tensor, version, sample in zip(self.names, self.of, self.versions, samples, strict=True):
            known = type(tensor) is Tensor and sample.numel()  # a fake one has no numbers
            how = "written" if tensor.untyped_storage().nbytes() or not tensor.numel() else "freed"  # by FSDP, say
            if how == "freed" or tensor._version != version or (known and not torch.equal(sample, _sample(tensor))):
                raise RuntimeError(
                    f"An output of {self.promise.name} was not made when it was returned, and cannot be made any more: "
                    f"{name} was {how} since. Read it before the optimizer's step, or optimize with returns='all'."
                )


def _sample(weight: Tensor) -> Tensor:
    """The bytes of some numbers of a weight: kernels of others, and writes to its ``.data``, count no version."""
    if not weight.is_contiguous() or not weight.numel() or weight.is_complex():
        return torch.empty(0, dtype=torch.uint8, device=weight.device)
    return weight.detach().view(-1)[:: -(-weight.numel() // _SAMPLED)].clone().view(torch.uint8)


_SAMPLED = 1024


def _levels() -> int:
    """Where, as ``warnings`` count from a function that the caller calls, neither outputs' code nor PyTorch runs."""
    frame, count = sys._getframe(1), 2
    while frame.f_back is not None and ("OutputSource" in frame.f_globals or _of_torch(frame)):
        frame, count = frame.f_back, count + 1
    return count


def _of_torch(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
