"""Cross-entropy of rows of logits, some rows at a time, in as little memory as it can have.

Of a vocabulary's worth of logits per token, autograd keeps the logarithms of all probabilities, in float32, and its
backward makes two more tensors of that size. Here it keeps the logits as they are, which a causal language model
returns anyway, and makes the rest again for some rows at a time. Every bit is that of ``F.cross_entropy``.

This file needs torch only, because its text is also pasted into generated models.
"""

from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_IGNORED = -100


def chunked_cross_entropy(
    logits: Tensor, target: Tensor, dtype: torch.dtype | None, reduction: int, ignore_index: int, rows: int
) -> Tensor:
    """``F.cross_entropy(logits.to(dtype), target, ignore_index=...)`` of logits (N, classes) and targets (N,).

    ``dtype`` None is that of the logits, or what autocast makes of it; ``reduction`` is 0 for none, 1 for the mean, 2
    for the sum, as ATen counts. Besides the logits and their gradient, at most three tensors of ``rows`` rows exist.
    """
    if dtype is None:
        autocast = logits.dtype in _HALF and torch.is_autocast_enabled(logits.device.type)
        dtype = torch.float32 if autocast else logits.dtype
    if torch.compiler.is_compiling():  # compilers fuse it
        return torch.ops.aten.cross_entropy_loss(logits.to(dtype), target, None, reduction, ignore_index)
    ignored = target == ignore_index
    chosen = _Chosen.apply(logits, target.masked_fill(ignored, 0), dtype, rows)  # type: ignore[no-untyped-call]
    # One class per row is left: the loss of these adds up the same numbers in the same order.
    return torch.ops.aten.nll_loss_nd(chosen[:, None], ignored * _IGNORED, None, reduction, _IGNORED)


class _Chosen(torch.autograd.Function):
    """The logarithm of the probability of one class per row; saves the logits and the classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
        ctx.save_for_backward(logits, classes)
        ctx.dtype, ctx.rows = dtype, rows
        parts = zip(logits.split(rows), classes.split(rows), strict=True)
        return torch.cat([_logarithms(part, dtype).gather(1, of[:, None]) for part, of in parts])[:, 0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, classes = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return _slope(logits, classes, grad, ctx.dtype), None, None, None
        result = torch.empty_like(logits)
        parts = (tensor.split(ctx.rows) for tensor in (result, logits, classes, grad))
        for out, part, of, slope in zip(*parts, strict=True):
            out.copy_(_slope(part, of, slope, ctx.dtype))
        return result, None, None, None


def _logarithms(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.log_softmax(logits.to(dtype), 1)


def _slope(logits: Tensor, classes: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    logarithms = _logarithms(logits, dtype)
    only = torch.zeros_like(logarithms).scatter_(1, classes[:, None], grad[:, None])
    return torch.ops.aten._log_softmax_backward_data(only, logarithms, 1, dtype).to(logits.dtype)
