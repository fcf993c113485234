"""The product with a head and its cross-entropy, some rows at a time: the logits never exist whole.

Of all that a language model's step keeps, the logits, their logarithms and their gradient are the largest. Here
autograd keeps what the head is given; backward makes the logits of some rows again, and with them the gradients of
those rows. So the product is made once more than otherwise, and the gradient of the weight is a sum over chunks, whose
last bits are others.

This file needs torch only, because its text is also pasted into generated models.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memrewrite.runtime.cross_entropy import in_autocast, reduced
from memrewrite.runtime.segment import autocast_dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    steps: tuple[tuple[Any, ...], ...],
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    rows: int,
) -> Tensor:
    """``F.cross_entropy`` of the logits ``F.linear(hidden, weight, bias)``, ``rows`` of them at a time.

    ``hidden`` is (N, width), ``weight`` (classes, width), ``target`` (N,); ``steps`` are the methods of the logits that
    lead to what cross-entropy is given, each a name and its arguments: ``(("to", torch.float32), ("div", 30.0))``.
    ``reduction`` is 0 for none, 1 for the mean, 2 for the sum, as ATen counts.
    """
    options = steps, ignore_index, label_smoothing
    if torch.compiler.is_compiling():  # compilers fuse what they can
        losses = _head_losses(hidden, weight, bias, target, class_weight, *options)
    else:
        given = hidden, weight, bias, target, class_weight
        losses = _LinearLosses.apply(*given, options, rows)  # type: ignore[no-untyped-call]
    if class_weight is None or reduction != 1:
        return reduced(losses, target, reduction, ignore_index)
    known = target != ignore_index
    return losses.sum() / class_weight[target.where(known, 0)].where(known, 0).sum()


class _LinearLosses(torch.autograd.Function):
    """The loss of each row; saves what it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        options: Any,
        rows: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.options, ctx.rows, ctx.autocast = options, rows, autocast_dtype(hidden.device.type)
        head = _cast_once(weight, ctx.autocast), _cast_once(bias, ctx.autocast)
        parts = zip(hidden.split(rows), target.split(rows), strict=True)
        return torch.cat([_head_losses(part, *head, of, class_weight, *options) for part, of in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        with in_autocast(hidden, ctx.autocast):
            if torch.is_grad_enabled():  # to be differentiated again
                slopes = _head_slopes_again(ctx, grad, (hidden, weight, bias), target, class_weight)
            else:
                slopes = _head_slopes(ctx, grad, (hidden, weight, bias), target, class_weight)
        return *slopes, None, None, None, None


Head = tuple[Tensor, Tensor, Tensor | None]
HeadSlopes = tuple[Tensor | None, Tensor | None, Tensor | None]


def _head_slopes_again(ctx: Any, grad: Tensor, head: Head, target: Tensor, class_weight: Tensor | None) -> HeadSlopes:
    losses = _head_losses(*head, target, class_weight, *ctx.options)
    wanted = [tensor for tensor, need in zip(head, ctx.needs_input_grad, strict=False) if need and tensor is not None]
    found = iter(torch.autograd.grad(losses, wanted, grad, create_graph=True))
    of_hidden, of_weight, of_bias = (next(found) if need else None for need in ctx.needs_input_grad[:3])
    return of_hidden, of_weight, of_bias


def _head_slopes(ctx: Any, grad: Tensor, head: Head, target: Tensor, class_weight: Tensor | None) -> HeadSlopes:
    """The gradients of what the head is given and of its parameters, rows by rows."""
    hidden, weight, bias = head
    of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
    product, shift = _cast_once(weight, ctx.autocast), _cast_once(bias, ctx.autocast)
    steps, *others = ctx.options
    start = 0
    for part, of, slope in zip(*(t.split(ctx.rows) for t in (hidden, target, grad)), strict=True):
        logits = functional.linear(part, product, shift).detach().requires_grad_()
        with torch.enable_grad():
            losses = _logit_losses(logits, of, class_weight, steps, *others)
        (of_logits,) = torch.autograd.grad(losses, logits, slope)
        del logits, losses
        if of_hidden is not None:
            of_hidden[start : start + len(part)] = of_logits @ product
        if of_weight is not None and of_weight.dtype == of_logits.dtype == part.dtype:
            of_weight.addmm_(of_logits.t(), part)
        elif of_weight is not None:
            of_weight += of_logits.t() @ _cast_once(part, ctx.autocast)
        if of_bias is not None:
            of_bias += of_logits.sum(0)
        start += len(part)
    return of_hidden, of_weight, of_bias


def _head_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *options: Any
) -> Tensor:
    return _logit_losses(functional.linear(hidden, weight, bias), target, class_weight, *options)


def _logit_losses(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    steps: tuple[tuple[Any, ...], ...],
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    for name, *arguments in steps:
        logits = getattr(logits, name)(*arguments)
    return torch.ops.aten.cross_entropy_loss(logits, target, class_weight, 0, ignore_index, label_smoothing)


def _cast_once(tensor: Any, dtype: torch.dtype | None) -> Any:
    """As autocast casts it, once for all rows."""
    return tensor if tensor is None or dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)
