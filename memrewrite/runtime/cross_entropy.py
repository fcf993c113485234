"""Cross-entropy of rows of logits, some rows at a time, in as little memory as it can have.

Of a vocabulary's worth of logits per token, autograd keeps the logarithms of all probabilities, in float32, and its
backward makes two more tensors of that size. Here it keeps the logits as they are, which a causal language model
returns anyway, and makes the rest again for some rows at a time. Every bit is that of ``F.cross_entropy``: the loss of
each row is its own, under the same autocast, and all of them are added up at once by the same kernel. What autocast
does to it is left to autocast, which is not the same everywhere: the CPU casts the logits to float32, CUDA only the
logarithms that it took of them in half precision.

This file needs torch only, because its text is also pasted into generated models.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from memrewrite.runtime.segment import autocast_dtype

_IGNORED = -100
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as ATen counts them
AT_ONCE = 2**24  # logits, 64 MiB in float32: kernels of that size outlast their launches
_PARTS = 16  # logits that few parts hold are made in as many smaller ones,
_LEAST_LOGITS = 2**20  # but no part is of fewer: 4 MiB in float32, a few microseconds of a GPU
_ALIGNED = 8  # rows: kernels add a row up in an order that depends on where in 16 bytes it begins


def too_few(logits: int, most: int = AT_ONCE) -> bool:
    """Whether so many logits are no more than two parts of ``most`` at most, so that they are made at once."""
    return logits <= 2 * _part_of(logits, most)


def rows_of(logits: int, classes: int, most: int = AT_ONCE, wide: int = 0) -> int:
    """How many rows of so many classes are one part: ``wide`` ones or a quarter of them, where that is more."""
    rows = max(_part_of(logits, most) // classes, min(wide, logits // classes // 4))
    return max(rows // _ALIGNED, 1) * _ALIGNED


def _part_of(logits: int, most: int) -> int:
    return min(most, max(logits // _PARTS, _LEAST_LOGITS))


def stepped(logits: Tensor, steps: tuple[tuple[Any, ...], ...]) -> Tensor:
    """What the methods that ``steps`` name, with their arguments, make of logits one after the other."""
    for name, *arguments in steps:
        logits = getattr(logits, name)(*arguments)
    return logits


def chunked_cross_entropy(
    logits: Tensor, target: Tensor, dtype: torch.dtype | None, reduction: int, ignore_index: int, rows: int
) -> Tensor:
    """``F.cross_entropy(logits.to(dtype), target, ignore_index=...)`` of logits (N, classes) and targets (N,).

    ``dtype`` None leaves the logits as they are; ``reduction`` is 0 for none, 1 for the mean, 2 for the sum, as ATen
    counts. Besides the logits and their gradient, at most three tensors of ``rows`` rows exist.
    """
    if torch.compiler.is_compiling():  # compilers fuse it
        return _losses(logits, target, dtype, reduction, ignore_index)
    losses = _Losses.apply(logits, target, dtype, ignore_index, rows)  # type: ignore[no-untyped-call]
    return reduced(losses, target, reduction, ignore_index)


def reduced(losses: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
    """What cross-entropy makes of the losses of all rows, bit for bit.

    As logarithms of one class per row: the loss of these adds up the same numbers in the same order.
    """
    return torch.ops.aten.nll_loss_nd(-losses[:, None], (target == ignore_index) * _IGNORED, None, reduction, _IGNORED)


class _Losses(torch.autograd.Function):
    """The loss of each row; saves the logits and the targets."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, dtype: torch.dtype | None, ignore_index: int, rows: int
    ) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.options, ctx.rows, ctx.autocast = (dtype, 0, ignore_index), rows, autocast_dtype(logits.device.type)
        parts = zip(logits.split(rows), target.split(rows), strict=True)
        return torch.cat([_losses_of_some(part, of, ctx.options) for part, of in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, target = ctx.saved_tensors
        with in_autocast(logits, ctx.autocast):
            if torch.is_grad_enabled():  # to be differentiated again
                whole = _losses(logits, target, *ctx.options)
                (slope,) = torch.autograd.grad(whole, logits, grad, create_graph=True)
                return slope, None, None, None, None
            result = torch.empty_like(logits)
            parts = (tensor.split(ctx.rows) for tensor in (result, logits, target, grad))
            for out, part, of, slope in zip(*parts, strict=True):
                out.copy_(_slope_of_some(part, of, slope, ctx.options))
        return result, None, None, None, None


def _losses(logits: Tensor, target: Tensor, dtype: torch.dtype | None, reduction: int, ignore_index: int) -> Tensor:
    wide = logits if dtype is None else logits.to(dtype)
    return torch.ops.aten.cross_entropy_loss(wide, target, None, reduction, ignore_index)


def _losses_of_some(logits: Tensor, target: Tensor, options: Any) -> Tensor:
    """``_losses`` without gradients; a simulation runs it once for rows that are alike."""
    return _losses(logits, target, *options)


def _slope_of_some(logits: Tensor, target: Tensor, grad: Tensor, options: Any) -> Tensor:
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = _losses(logits, target, *options)
    return torch.autograd.grad(losses, logits, grad)[0]


def in_autocast(tensor: Tensor, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast as ``autocast_dtype`` found it."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or (dtype is None and not torch.is_autocast_enabled(kind)):
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False)
