"""Attention of some texts or heads at a time: its backward then takes what a piece takes. Torch only.

Kernels that compute attention hold its gradients in float32 beside their results. Each piece is attended again in
backward, so that what forward made of it is not kept.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from torch import Tensor

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.segment import autocast_dtype


def attention_in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    pieces: int,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` without dropout, of (batch, heads, length, width), in about ``pieces``.

    These are of the batch, or where that is smaller of the heads, those together that share keys (``enable_gqa``).
    """
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    dim = 0 if len(query) >= pieces or key.shape[1] < 2 else 1
    if torch.compiler.is_compiling() or key.shape[dim] < 2:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    found: Tensor = _AttentionInPieces.apply(query, key, value, attn_mask, dim, pieces, options)  # type: ignore[no-untyped-call]
    return found


class _AttentionInPieces(torch.autograd.Function):
    """Keeps what it is given."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dim: int, pieces: int, options: Any
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.dim, ctx.pieces, ctx.options = dim, pieces, options
        ctx.autocast = autocast_dtype(query.device.type)
        return _attended(dim, pieces, options, query, key, value, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        given = [query, key, value] if mask is None else [query, key, value, mask]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[:4]) if need]
        with in_autocast(query, ctx.autocast):
            if torch.is_grad_enabled():  # to be differentiated again
                whole = F.scaled_dot_product_attention(query, key, value, mask, **ctx.options)
                slopes = torch.autograd.grad(whole, [given[i] for i in wanted], gradient, create_graph=True)
                return _in_places(wanted, slopes)
            totals = _attention_slopes(ctx.dim, ctx.pieces, ctx.options, given, wanted, gradient)
        return _in_places(wanted, totals)


def _attended(
    dim: int, pieces: int, options: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    results: list[Tensor] = []
    for piece_of in _attention_pieces(dim, pieces, key):
        # PyTorch takes another kernel where the mask needs a gradient, also where none is recorded.
        masked = None if mask is None else piece_of(mask).detach().requires_grad_(mask.requires_grad)
        given: list[Any] = [*map(piece_of, (query, key, value)), masked]
        part = F.scaled_dot_product_attention(*given, **options)
        results = results or [_room_like(part, query, value.shape[-1])]
        piece_of(results[0]).copy_(part)
        del part, given, masked
    return results[0]


def _attention_slopes(
    dim: int,
    pieces: int,
    options: Any,
    given: list[Tensor],
    wanted: list[int],
    gradient: Tensor,
) -> list[Tensor]:
    """The gradients of those of query, key, value and mask that are ``wanted``."""
    totals = [torch.zeros_like(given[i]) if i == 3 else torch.empty_like(given[i]) for i in wanted]
    for piece_of in _attention_pieces(dim, pieces, given[1]):
        leaves: list[Any] = [piece_of(t).detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(*leaves, **options)
        found = torch.autograd.grad(result, [leaves[i] for i in wanted], piece_of(gradient))
        for i, total, slope in zip(wanted, totals, found, strict=True):
            piece_of(total).add_(slope) if i == 3 else piece_of(total).copy_(slope)  # a mask may be one for all
        del result, found, slope
    return totals


def _in_places(places: list[int], values: Any) -> tuple[Tensor | None, ...]:
    """As many as forward has arguments, ``values`` in their ``places``."""
    found = dict(zip(places, values, strict=True))
    return tuple(found.get(i) for i in range(7))


def _attention_pieces(dim: int, pieces: int, key: Tensor) -> Iterator[Callable[[Any], Any]]:
    """For each piece what gives that part of a tensor."""
    count, start = key.shape[dim], 0
    for at in range(pieces):
        length = count * (at + 1) // pieces - start
        if length:
            yield functools.partial(_piece_of, dim, count, start, length)
        start += length


def _piece_of(dim: int, count: int, start: int, length: int, tensor: Tensor | None) -> Tensor | None:
    """That part of a tensor, where there are ``count`` of the keys; a mask that is one for all stays what it is."""
    if tensor is None or tensor.shape[dim] == 1:
        return tensor
    several = tensor.shape[dim] // count
    return tensor.narrow(dim, start * several, length * several)


def _room_like(part: Tensor, query: Tensor, width: int) -> Tensor:
    """Room for all of the result, which lies in memory as ``part`` does."""
    order = sorted(range(4), key=lambda dim: (part.stride(dim), query.stride(dim)), reverse=True)
    shape = (*query.shape[:-1], width)
    return part.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
