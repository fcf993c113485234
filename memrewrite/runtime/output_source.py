"""What makes an output of a program until that is made, of tensors as they were then.

This file needs torch only, because its text is also pasted into generated models.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.row_expressions import Rows


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
        self.make, self.autocast, self.promise = make, autocast, promise
        self.shape, self.dtype = shape, dtype
        # These stay as they are where ``.data`` is set; products of what needs a gradient run by other kernels.
        self.of = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in of]
        samples = itertools.chain([self.of[0].new_empty(0)], map(_sample, self.of[1:]))
        self.checks = [*map(_Check, names, self.of, (tensor._version for tensor in of), samples)]
        self.made: Tensor | None = None
        self.rows: Rows | None = None  # of which it is made, gradients included
        self.writes = 0
        self.lost: list[Any] = []  # the shapes of those, casts of the output among them, whose loss was made by rows
        self.all_lost = [self.lost]  # of those that it is made of, too
        self.output: TensorWeakRef | None = None  # the one that was made by this first: it has the gradient

    @classmethod
    def of_rows(cls, rows: Rows, parents: Sequence["OutputSource"]) -> "OutputSource":
        """For what is made of such rows of what the parents make, and of tensors beside these."""
        first, layout = parents[0], rows.layout
        self = cls(rows.made, rows.tensors, (), layout.shape, layout.dtype, first.autocast, first.promise)
        known = {id(check): check for parent in parents for check in parent.checks}
        beside = (leaf for leaf, kind in rows.leaves.values() if kind in ("rows", "whole"))
        new = (_Check(_BESIDE, leaf.detach(), leaf._version, leaf.new_empty(0)) for leaf in beside)
        self.checks = [*known.values(), *new]
        self.all_lost += {id(lost): lost for parent in parents for lost in parent.all_lost}.values()
        self.rows = rows
        return self

    def then(self, change: Callable[[Tensor], Tensor], shape: torch.Size, dtype: torch.dtype) -> "OutputSource":
        """The same for what ``change`` makes of the output, a copy: writes to the output do not change it."""
        changed, make = copy.copy(self), self.make
        changed.make, changed.output, changed.rows = lambda *of: change(make(*of)), None, None
        changed.shape, changed.dtype = shape, dtype
        return changed

    def write(self, change: Callable[[Tensor], Any]) -> None:
        """Change the output, in place, once it is made."""
        make = self.make

        def written(*of: Tensor) -> Tensor:
            made = make(*of)
            change(made)
            return made

        self.make, self.rows, self.writes = written, None, self.writes + 1

    @property
    def held(self) -> list[Tensor]:
        """The tensors that stay because of it."""
        return [*self.of, *(check.sample for check in self.checks)] if self.made is None else [self.made]

    def get(self) -> Tensor:
        """The output, which is made now if it is not there."""
        if self.made is not None:
            return self.made
        self._tell()
        return self._keep(self._make())

    def of_its_rows(self) -> Tensor | None:
        """The output with the gradient of its rows, made now; None where it is there, or made in another way."""
        if self.rows is None or self.made is not None:
            return None
        self._tell()
        with in_autocast(self.of[0], self.autocast):
            found = self.rows.made()
        self._keep(found.detach())
        return found

    def _tell(self) -> None:
        self.refuse_changed()
        size = self.shape.numel() * self.dtype.itemsize
        self.promise.tell_of_output(tuple(self.shape), size, _levels())

    def _keep(self, made: Tensor) -> Tensor:
        self.made, self.of, self.checks, self.rows = made, [], [], None
        return made

    def apart(self) -> Tensor:
        """The output, which is made apart if it is not there."""
        if self.made is not None:
            return self.made
        self.refuse_changed()
        return self._make()

    def _make(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), in_autocast(self.of[0], self.autocast):
            return self.make(*self.of)

    def lose(self) -> None:
        """Note that no gradient comes to it any more, nor to what it is made of."""
        for lost in self.all_lost:
            lost.append(tuple(self.shape))

    def refuse_changed(self) -> None:
        """Raise where one of the tensors has changed, so that the output cannot be made any more."""
        for name, tensor, version, sample in self.checks:
            known = type(tensor) is Tensor and sample.numel()  # a fake one has no numbers
            how = "written" if tensor.untyped_storage().nbytes() or not tensor.numel() else "freed"  # by FSDP, say
            if how == "freed" or tensor._version != version or (known and not torch.equal(sample, _sample(tensor))):
                raise RuntimeError(
                    f"An output of {self.promise.name} was not made when it was returned, and cannot be made any more: "
                    f"{name} was {how} since. Read it before the optimizer's step, or optimize with returns='all'."
                )


class _Check(NamedTuple):
    """What an output is made of, as it was then."""

    name: str
    tensor: Tensor
    version: int
    sample: Tensor


_BESIDE = "what was computed with it"


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
