"""Logits by the rows that they are made of, and what comes to a number a row, which makes some of them at a time.

This file needs torch only, because its text is also pasted into generated models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memrewrite.runtime.cross_entropy import rows_of, stepped
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.runtime.tiles import in_tiles

MOVES = {Tensor.transpose, Tensor.permute, torch.transpose, torch.permute}
_REDUCTION = {"none": 0, "mean": 1, "sum": 2}


@dataclass(frozen=True)
class OutputRows:
    """Each row of an output is the product with that row of ``hidden`` and ``steps``, as in ``linear_cross_entropy``.

    A loss is made of so many ``rows`` at a time, or a quarter of all, ``fused`` as there. ``layout`` has the output's
    sizes and strides; the classes are in its last dimension, or ``moved`` to the second.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[tuple[Any, ...], ...]
    rows: int
    fused: bool
    layout: Tensor
    moved: bool = False

    def after(self, func: Any, change: Callable[[Tensor], Tensor], layout: Tensor) -> "OutputRows | None":
        """Those of what ``func`` makes of the output by ``change``, in this ``layout``; None if it is no such rows."""
        if layout.dtype != self.layout.dtype:
            return replace(self, steps=(*self.steps, ("to", layout.dtype)), layout=layout)
        if func is Tensor.contiguous:
            return replace(self, layout=layout)
        if self.moved:
            return None
        if func in MOVES:
            strides = layout.stride() if layout.dim() == 3 else (0, 0, 0)
            moved = strides[1] == 1 and strides[0] >= strides[2] and layout.shape[1] == len(self.weight)
            return replace(self, layout=layout, moved=True) if moved else None
        sizes = (*layout.shape[:-1], self.hidden.shape[-1])
        if layout.dim() < 2 or layout.shape[-1] != len(self.weight):
            return None
        hidden = change(self.hidden) if func is Tensor.__getitem__ else self.hidden.reshape(sizes)
        return replace(self, hidden=hidden, layout=layout) if hidden.shape == sizes else None

    def detached(self) -> "OutputRows":
        """The same without a gradient."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def fit(self, target: Any, reduction: str) -> bool:
        """Whether ``loss`` is what ``F.cross_entropy`` makes of an output with this target."""
        classes = isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == self.hidden.shape[:-1]
        placed = self.moved or self.layout.dim() == 2
        return classes and placed and reduction in _REDUCTION

    def loss(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """Cross-entropy, the logits of which are made some rows at a time."""
        rows, early = rows_of(self.layout.numel(), len(self.weight), wide=self.rows), reduction != "none"
        how: Any = self.steps, _REDUCTION[reduction], ignore_index, label_smoothing, rows, early, early and self.fused
        given = self.hidden.flatten(0, -2), self.weight, self.bias, target.flatten(), weight
        loss = linear_cross_entropy(*given, *how)
        return loss.view_as(target) if reduction == "none" else loss

    def each(self, func: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Tensor | None:
        """``func`` of each row, ``argmax`` or ``logsumexp``; None of anything but rows."""
        if more or self.moved or dim not in (-1, self.layout.dim() - 1):
            return None

        def part(hidden: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
            found: Tensor = func(stepped(functional.linear(hidden, weight, *bias), self.steps), -1, True)
            return found

        given = self.hidden, self.weight, *(() if self.bias is None else (self.bias,))
        weights = tuple(range(1, len(given)))
        result: Tensor = in_tiles(part, (0,), weights, rows_of(self.layout.numel(), len(self.weight)), *given)
        return result if keepdim else result.squeeze(-1)
