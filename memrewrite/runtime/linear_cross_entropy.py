"""The product with a head and its cross-entropy, some rows at a time: the logits never exist whole.

Of all that a language model's step keeps, the logits, their logarithms and their gradient are the largest. Here
gradients are made beside the loss, of the same rows of logits, and backward only scales them, as Liger's kernel does
(arXiv 2410.10989). Where they cannot be, autograd keeps what the head is given, and backward makes the logits of some
rows again. The gradient of the weight is a sum over chunks, whose last bits are others.

This file needs torch only, because its text is also pasted into generated models.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from memrewrite.runtime.cross_entropy import in_autocast, reduced, stepped
from memrewrite.runtime.fused import at_once
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
    early: bool = False,
    fused: bool = False,
) -> Tensor:
    """``F.cross_entropy`` of the logits ``F.linear(hidden, weight, bias)``, ``rows`` of them at a time.

    ``hidden`` is (N, width), ``weight`` (classes, width), ``target`` (N,); ``steps`` are the methods of the logits that
    lead to what cross-entropy is given, each a name and its arguments: ``(("to", torch.float32), ("div", 30.0))``.
    ``reduction`` is 0 for none, 1 for the mean, 2 for the sum, as ATen counts. ``early`` makes gradients in forward,
    but not in float16, in which they would be nothing until a scaler has scaled them. ``fused`` compiles what is
    computed of logits then. Compiled, the logits are whole unless it is ``early``: then it is an operator to compilers.
    """
    options = steps, ignore_index, label_smoothing
    given = hidden, weight, bias, target, class_weight
    early = early and torch.is_grad_enabled() and not _underflows(hidden)
    if torch.compiler.is_compiling():
        if early:
            return _as_operator(given, options, reduction, rows)
        return _loss_of(_head_losses(*given, *options), target, class_weight, reduction, ignore_index)
    if early:
        loss: Tensor = _EarlyLoss.apply(*given, options, reduction, rows, fused)  # type: ignore[no-untyped-call]
        return loss
    losses = _LinearLosses.apply(*given, options, rows)  # type: ignore[no-untyped-call]
    return _loss_of(losses, target, class_weight, reduction, ignore_index)


def _underflows(hidden: Tensor) -> bool:
    return torch.float16 in (hidden.dtype, autocast_dtype(hidden.device.type))


def _loss_of(losses: Tensor, target: Tensor, class_weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    if class_weight is None or reduction != 1:
        return reduced(losses, target, reduction, ignore_index)
    return losses.sum() / _weights(target, class_weight, ignore_index).sum()


def _weights(target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    """How much each row counts, 0 where it is ignored."""
    known = target != ignore_index
    return known if class_weight is None else class_weight[target.where(known, 0)].where(known, 0)


class _EarlyLoss(torch.autograd.Function):
    """The loss; holds its gradients by the head and what that is given until the first backward gives them away.

    Another backward, through a graph that was retained, computes them again, and one to be differentiated again
    differentiates the plain form: so what the head is given is kept, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        options: Any,
        reduction: int,
        rows: int,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target, class_weight)
        ctx.terms = _Terms(options, rows, autocast_dtype(hidden.device.type), ctx.needs_input_grad[:3])
        ctx.reduction, ctx.fused = reduction, fused
        losses, ctx.slopes = _early(ctx.terms, reduction, fused, (hidden, weight, bias), target, class_weight)
        return _loss_of(losses, target, class_weight, reduction, options[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        head = hidden, weight, bias
        terms = ctx.terms._replace(wanted=ctx.needs_input_grad[:3])
        with in_autocast(hidden, terms.autocast):
            if torch.is_grad_enabled():  # to be differentiated again
                losses = _head_losses(*head, target, class_weight, *terms.options)
                loss = _loss_of(losses, target, class_weight, ctx.reduction, terms.options[1])
                slopes = _slopes_again(terms.wanted, loss, grad, head)
            else:
                slopes = ctx.slopes or _early(terms, ctx.reduction, ctx.fused, head, target, class_weight)[1]
                ctx.slopes = None
                for slope in (each for each in slopes if each is not None):
                    slope.mul_(grad)
        return *slopes, *[None] * 6


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
        ctx.terms = _Terms(options, rows, autocast_dtype(hidden.device.type), ctx.needs_input_grad[:3])
        return _late(ctx.terms, (hidden, weight, bias), target, class_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, class_weight = ctx.saved_tensors
        head = hidden, weight, bias
        terms = ctx.terms._replace(wanted=ctx.needs_input_grad[:3])
        with in_autocast(hidden, terms.autocast):
            if torch.is_grad_enabled():  # to be differentiated again
                losses = _head_losses(*head, target, class_weight, *terms.options)
                slopes = _slopes_again(terms.wanted, losses, grad, head)
            else:
                slopes = _late_slopes(terms, head, target, class_weight, grad)
        return *slopes, *[None] * 4


Head = tuple[Tensor, Tensor, Tensor | None]
HeadSlopes = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Terms(NamedTuple):
    """What is computed of logits, ``rows`` of them at a time, and which gradients by what makes them are ``wanted``."""

    options: Any
    rows: int
    autocast: torch.dtype | None
    wanted: tuple[bool, ...]


def _slopes_again(wanted: tuple[bool, ...], of: Tensor, grad: Tensor, head: Head) -> HeadSlopes:
    asked = [tensor for tensor, need in zip(head, wanted, strict=True) if need and tensor is not None]
    found = iter(torch.autograd.grad(of, asked, grad, create_graph=True))
    of_hidden, of_weight, of_bias = (next(found) if need else None for need in wanted)
    return of_hidden, of_weight, of_bias


def _late(terms: _Terms, head: Head, target: Tensor, class_weight: Tensor | None) -> Tensor:
    """The losses of all rows."""
    hidden, weight, bias = head
    cast = cast_once(weight, terms.autocast), cast_once(bias, terms.autocast)
    parts = zip(hidden.split(terms.rows), target.split(terms.rows), strict=True)
    return torch.cat([_head_losses_of_some((part, *cast), of, class_weight, terms.options) for part, of in parts])


def _late_slopes(terms: _Terms, head: Head, target: Tensor, class_weight: Tensor | None, grad: Tensor) -> HeadSlopes:
    """The gradients of what losses are made of, by theirs."""

    def slope_of(part: Head, some: slice) -> Tensor:
        return _slope_by_losses(part, target[some], class_weight, grad[some], terms.options)

    return _by_rows(terms, head, slope_of)


def _early(
    terms: _Terms, reduction: int, fused: bool, head: Head, target: Tensor, class_weight: Tensor | None
) -> tuple[Tensor, HeadSlopes]:
    """The losses of all rows, and the gradients of what is made of them."""
    dtype = head[0].dtype if terms.autocast is None or head[0].dtype == torch.float64 else terms.autocast
    of_losses = _logit_losses(head[0].new_empty((0, 1), dtype=dtype), target[:0], None, *terms.options).dtype
    share = torch.ones((), dtype=widened(of_losses), device=target.device)
    if reduction == 1:
        share = share / _weights(target, class_weight, terms.options[1]).sum()
    options, losses = (*terms.options, of_losses), list[Tensor]()
    name = f"cross_entropy_{hashlib.sha256(repr((options,)).encode()).hexdigest()[:12]}" if fused else None

    def slope_of(part: Head, some: slice) -> Tensor:
        loss, slope = _slope_at_once(part, target[some], share, class_weight, options, name)
        losses.append(loss)
        return slope

    slopes = _by_rows(terms, head, slope_of)
    return torch.cat(losses), slopes


def _by_rows(terms: _Terms, head: Head, slope_of: Callable[[Head, slice], Tensor]) -> HeadSlopes:
    """The gradients of what the head is given and of its parameters, by those of some rows of logits at a time."""
    hidden, weight, bias = head
    of_hidden = torch.empty_like(hidden) if terms.wanted[0] else None
    of_weight = torch.zeros_like(weight) if terms.wanted[1] else None
    of_bias = torch.zeros_like(bias) if bias is not None and terms.wanted[2] else None
    product, shift = cast_once(weight, terms.autocast), cast_once(bias, terms.autocast)
    start = 0
    for part in hidden.split(terms.rows):
        some = slice(start, start + len(part))
        slope = slope_of((part, product, shift), some)
        if of_hidden is not None:
            of_hidden[some] = slope @ product
        if of_weight is not None and of_weight.dtype == slope.dtype == part.dtype:
            of_weight.addmm_(slope.t(), part)
        elif of_weight is not None:
            of_weight += slope.t() @ cast_once(part, terms.autocast)
        if of_bias is not None:
            of_bias += slope.sum(0)
        start = some.stop
        del slope  # before the next logits are made
    return of_hidden, of_weight, of_bias


def _head_losses_of_some(part: Head, target: Tensor, class_weight: Tensor | None, options: Any) -> Tensor:
    return _head_losses(*part, target, class_weight, *options)


def _slope_by_losses(part: Head, target: Tensor, class_weight: Tensor | None, grad: Tensor, options: Any) -> Tensor:
    """The gradient of some logits, by that of their losses."""
    logits = functional.linear(*part).detach().requires_grad_()
    with torch.enable_grad():
        losses = _logit_losses(logits, target, class_weight, *options)
    return torch.autograd.grad(losses, logits, grad)[0]


def _slope_at_once(
    part: Head, target: Tensor, share: Tensor, class_weight: Tensor | None, options: Any, name: str | None
) -> Sequence[Tensor]:
    """The losses of some logits and the gradient of these, compiled where that has a ``name``."""
    chain = functools.partial(_losses_and_slope, options)
    given = [functional.linear(*part), target, share, *([] if class_weight is None else [class_weight])]
    return at_once(name, chain, given) if name else chain(*given)


def _losses_and_slope(
    options: Any, logits: Tensor, target: Tensor, share: Tensor, class_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The losses of some rows, and the gradient of their logits where each loss counts for its ``share``."""
    steps, ignore_index, smoothing, dtype = options
    values = [logits]
    for name, *arguments in steps:
        values.append(getattr(values[-1], name)(*arguments))
    logs = torch.log_softmax(values[-1], 1, dtype=widened(values[-1].dtype))
    known, classes = target != ignore_index, logits.shape[1]
    place = target.where(known, 0)[:, None]
    weight = _weights(target, class_weight, ignore_index).to(logs.dtype)
    losses = (smoothing - 1) * weight * logs.gather(1, place)[:, 0]
    share = share.where(known, 0)
    chosen = ((1 - smoothing) * weight * share)[:, None]
    spread = None
    if smoothing:
        spread = smoothing / classes * (logs.new_ones(classes) if class_weight is None else class_weight)
        losses = losses - (logs * spread).sum(1).where(known, 0)
    slope = logs.exp() * (chosen if spread is None else chosen + (share * spread.sum())[:, None])
    if spread is not None:
        slope = slope - share[:, None] * spread
    if torch.compiler.is_compiling():
        slope = slope - chosen * (torch.arange(classes, device=logits.device) == place)
    else:
        slope.scatter_add_(1, place, -chosen)
    for (name, *arguments), before, after in zip(steps[::-1], values[-2::-1], values[:0:-1], strict=True):
        if name == "tanh":
            slope = slope * (1 - after * after)
        elif name in ("mul", "div"):
            slope = getattr(slope, name)(*arguments)
        slope = slope.to(widened(before.dtype))
    return losses.to(dtype), slope.to(logits.dtype)


def widened(dtype: torch.dtype) -> torch.dtype:
    """In which a half type is computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


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
    wide = stepped(logits, steps)
    return torch.ops.aten.cross_entropy_loss(wide, target, class_weight, 0, ignore_index, label_smoothing)


def cast_once(tensor: Any, dtype: torch.dtype | None) -> Any:
    """As autocast casts it, once for all rows."""
    return tensor if tensor is None or dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def _as_operator(given: tuple[Any, ...], options: Any, reduction: int, rows: int) -> Tensor:
    """The loss by one operator, which compilers leave as it is; it makes the gradients that are asked for, too."""
    steps, ignore_index, smoothing = options
    names = [_TYPES[step[1]] if step[0] == "to" else step[0] for step in steps]
    numbers = [float(step[1]) if step[0] in ("mul", "div") else 0.0 for step in steps]
    autocast = autocast_dtype(given[0].device.type)
    wanted = [tensor is not None and tensor.requires_grad for tensor in given[:3]]
    how = names, numbers, ignore_index, smoothing, reduction, rows, autocast, wanted
    loss: Tensor = torch.ops.memrewrite.linear_loss(*given, *how)[0]
    return loss


_TYPES = {getattr(torch, name): name for name in ("float64", "float32", "bfloat16", "float16")}


def _steps(names: list[str], numbers: list[float]) -> tuple[tuple[Any, ...], ...]:
    """The methods of logits that the operator was given."""
    dtypes = {name: dtype for dtype, name in _TYPES.items()}
    found: list[tuple[Any, ...]] = []
    for name, number in zip(names, numbers, strict=True):
        found.append(("to", dtypes[name]) if name in dtypes else (name,) if name == "tanh" else (name, number))
    return tuple(found)


def run_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    names: list[str],
    numbers: list[float],
    ignore_index: int,
    smoothing: float,
    reduction: int,
    rows: int,
    autocast: torch.dtype | None,
    wanted: list[bool],
) -> list[Tensor]:
    """The loss, and the gradients by the head and what it is given that are ``wanted``."""
    options = _steps(names, numbers), ignore_index, smoothing
    terms = _Terms(options, rows, autocast, (*wanted,))
    with torch.no_grad(), in_autocast(hidden, autocast):
        losses, slopes = _early(terms, reduction, True, (hidden, weight, bias), target, class_weight)
        loss = _loss_of(losses, target, class_weight, reduction, ignore_index)
    return [loss, *(slope for slope in slopes if slope is not None)]


def _loss_on_fakes(*given: Any) -> list[Tensor]:
    hidden, weight, bias, target, class_weight, *how, reduction, _, autocast, wanted = given
    names, numbers, ignore_index, smoothing = how
    with in_autocast(hidden, autocast):
        head = hidden, weight, bias
        losses = _head_losses(*head, target, class_weight, _steps(names, numbers), ignore_index, smoothing)
        loss = _loss_of(losses, target, class_weight, reduction, ignore_index)
    return [loss, *(torch.empty_like(tensor) for tensor, need in zip(given, wanted, strict=False) if need)]


def _keep_slopes(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.wanted = inputs[-1]
    ctx.others = tuple([] if isinstance(each, list) and not each else None for each in inputs[3:])
    ctx.save_for_backward(*output[1:])


def _scaled_slopes(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    """The gradients; PyTorch takes an empty list for one of tensors, which has as many."""
    slopes = iter(ctx.saved_tensors)
    return *(next(slopes) * gradients[0] if need else None for need in ctx.wanted), *ctx.others


if not hasattr(torch.ops.memrewrite, "linear_loss"):
    torch.library.define(
        "memrewrite::linear_loss",
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, str[] names, "
        "float[] numbers, int ignore_index, float smoothing, int reduction, int rows, ScalarType? autocast, "
        "bool[] wanted) -> Tensor[]",
    )
    torch.library.impl("memrewrite::linear_loss", "CompositeExplicitAutograd", run_loss)
    torch.library.register_fake("memrewrite::linear_loss", _loss_on_fakes)
    torch.library.register_autograd("memrewrite::linear_loss", _scaled_slopes, setup_context=_keep_slopes)
LOSS = torch.ops.memrewrite.linear_loss.default
