"""Logits by the rows that they are made of, and what comes to a number a row, which makes some of them at a time.

This file needs torch only, because its text is also pasted into generated models.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memrewrite.runtime.cross_entropy import REDUCTIONS, rows_of, stepped
from memrewrite.runtime.linear_cross_entropy import cast_once, linear_cross_entropy, widened
from memrewrite.runtime.row_expressions import LOGARITHMS, MOVES, TAKES, Leaves, Replacing, Rows, reshaped
from memrewrite.runtime.segment import autocast_dtype

SCALED: dict[Any, str] = {
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), "mul"),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), "div"),
}
SCALED_IN_PLACE: dict[Any, str] = {
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), "mul"),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), "div"),
}
_LOGS = "log_softmax"


@dataclass(frozen=True, eq=False)
class OutputRows(Rows):
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

    @functools.cached_property
    def leaves(self) -> Leaves:  # type: ignore[override]
        """What the product is of."""
        found = ((self.hidden, "hidden"), (self.weight, "weight"), (self.bias, "weight"))
        return {id(each): (each, kind) for each, kind in found if each is not None}

    def value(self, at: dict[int, Tensor], known: dict[Any, Tensor]) -> Tensor:
        """The output, of a product that others may be of, too."""
        head: Any = self.hidden, self.weight, self.bias
        if (product := tuple(map(id, head))) not in known:
            known[product] = functional.linear(*(at.get(id(each), each) for each in head))
        return stepped(known[product], self.steps)

    def replaced(self, replacing: Replacing, known: dict[int, Any]) -> "OutputRows":
        """The same of another product."""
        for leaf, kind in self.leaves.values():
            if id(leaf) not in known:
                known[id(leaf)] = replacing(leaf, kind)
        head = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        new: Any = {name: known.get(id(each), each) for name, each in head.items()}
        return replace(self, **new)

    def _step(self, func: Any, *given: Any, **options: Any) -> tuple[Any, ...] | None:
        """What a call makes of each row alone, as one of ``steps``; None of any other."""
        if func in SCALED:
            number = given[0] if len(given) == 1 and not options else None
            return (SCALED[func], number) if type(number) in (int, float) else None
        dim, *others = *given, *([options["dim"]] if "dim" in options else []), options.get("dtype")
        dtype = next((other for other in others if isinstance(other, torch.dtype)), None)
        return (_LOGS, -1, dtype) if self._is_along_rows(dim) else None

    def stepped(self, *step: Any) -> "OutputRows":
        """Those of one step more."""
        return replace(self, steps=(*self.steps, step))

    def after(
        self, func: Any, change: Callable[[Tensor], Tensor], layout: Tensor, given: tuple[Any, dict[str, Any]]
    ) -> "OutputRows | None":
        """Those of what ``func`` makes of the output and what is ``given``, as ``change`` does; None if it is no such
        rows. ``layout`` is that of the result."""
        if func in SCALED or func in LOGARITHMS:
            if (step := self._step(func, *given[0], **given[1])) is None:
                return None
            # autocast may give another type than that of the layout
            dtype = stepped(self.hidden.new_empty((0, 1), dtype=self.layout.dtype), (step,)).dtype
            return replace(self, steps=(*self.steps, step), layout=layout.to(dtype))
        if layout.dtype != self.layout.dtype:
            if func is Tensor.view:  # of the same bits
                return None
            return replace(self, steps=(*self.steps, ("to", layout.dtype)), layout=layout)
        if func is Tensor.contiguous:
            return replace(self, layout=layout)
        if self.moved:
            return None
        if func in MOVES:
            strides = layout.stride() if layout.dim() == 3 else (0, 0, 0)
            moved = strides[1] == 1 and strides[0] >= strides[2] and layout.shape[1] == len(self.weight)
            return replace(self, layout=layout, moved=True) if moved else None
        if layout.dim() < 2 or layout.shape[-1] != len(self.weight):
            return None
        found: OutputRows | None = self.chosen(change if func in TAKES else reshaped(layout), layout)
        return found

    def detached(self) -> "OutputRows":
        """The same without a gradient, each time of the same tensors."""
        return self._detached

    @functools.cached_property
    def _detached(self) -> "OutputRows":
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def before_logarithms(self) -> "OutputRows | None":
        """Those that the logarithms were taken of; None where none were taken last."""
        if not self.steps or self.steps[-1][0] != _LOGS:
            return None
        return replace(self, steps=(*self.steps[:-1], ("to", self.layout.dtype)))

    @property
    def _has_logarithms(self) -> bool:
        return any(name == _LOGS for name, *_ in self.steps)

    def fit(self, target: Any, reduction: str) -> bool:
        """Whether ``loss`` is what ``F.cross_entropy`` makes of an output with this target."""
        classes = isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == self.hidden.shape[:-1]
        placed = self.moved or self.layout.dim() == 2
        return classes and placed and reduction in REDUCTIONS and not self._has_logarithms

    def loss(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float = 0.0
    ) -> Tensor:
        """Cross-entropy, the logits of which are made some rows at a time."""
        rows, early = rows_of(self.layout.numel(), len(self.weight), wide=self.rows), reduction != "none"
        how: Any = self.steps, REDUCTIONS[reduction], ignore_index, label_smoothing, rows, early, early and self.fused
        given = self.hidden.flatten(0, -2), self.weight, self.bias, target.flatten(), weight
        loss = linear_cross_entropy(*given, *how)
        return loss.view_as(target) if reduction == "none" else loss

    def gather(self, func: Any, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor | None:
        """Those of the numbers of each row that ``index`` counts; None of anything but rows."""
        places = index.shape[:-1] == self.layout.shape[:-1]
        if (
            places
            and not sparse_grad
            and index.shape[-1] == 1
            and self._is_along_rows(dim)
            and not self._has_logarithms
        ):
            return self._products(index)
        return super().gather(func, dim, index, sparse_grad=sparse_grad)

    def _products(self, index: Tensor) -> Tensor:
        """One number of each row, for which the others need not be made."""
        autocast = autocast_dtype(self.hidden.device.type)
        hidden = cast_once(self.hidden, autocast)
        weight, shift = cast_once(functional.embedding(index, self.weight), autocast), cast_once(self.bias, autocast)
        found = torch.linalg.vecdot(*(each.to(widened(each.dtype)) for each in (hidden.unsqueeze(-2), weight)))
        return stepped((found if shift is None else found + shift[index]).to(hidden.dtype), self.steps)
