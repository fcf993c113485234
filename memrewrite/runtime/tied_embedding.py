"""An embedding whose weight something else reads, too, with one gradient for all of them. Torch only.

Autograd makes one of the size of the weight for each and adds them up where backward ends. What comes later reads the
weight by way of the embedding here, whose backward is thereby given their gradient and adds the rows of the words that
it looked up, and nothing else, in place: the same sums, to the last bit, as the original's. Some columns at a time, as
CUDA makes float32 sums of up to as many rows as there are tokens first: no column is added to another.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_AT_ONCE, _NARROW = 2**23, 256  # numbers of a gradient that is made at once, but no fewer columns


def tied_embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1) -> tuple[Tensor, Tensor]:
    """``F.embedding(indices, weight, padding_idx)``, and ``weight`` for what else reads it.

    What reads that has to give a gradient of its own, that nothing else holds, as products do. Compiled, there are two
    gradients, of which this one is left to ATen: Inductor's would be made in float32.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return torch.ops.aten.embedding(weight, indices, padding_idx), weight
    if torch.compiler.is_compiling():
        return torch.ops.memrewrite.embedding(weight, indices, padding_idx), weight
    found: tuple[Tensor, Tensor] = _TiedEmbedding.apply(weight, indices, padding_idx)  # type: ignore[no-untyped-call]
    return found


class _TiedEmbedding(torch.autograd.Function):
    """Saves the indices alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, indices: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.embedding(weight, indices, padding_idx), weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep_indices(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor | None, of_weight: Tensor | None) -> tuple[Tensor | None, None, None]:
        (indices,) = ctx.saved_tensors
        if of_rows is None:
            return of_weight, None, None
        again = torch.is_grad_enabled()  # the gradient is to be differentiated
        if again or of_weight is None or of_weight.dtype != of_rows.dtype:
            dense = torch.ops.aten.embedding_dense_backward(of_rows, indices, ctx.count, ctx.padding_idx, False)
            return dense if of_weight is None else of_weight + dense, None, None
        (_add_rows if indices.numel() < ctx.count else _add_all)(of_weight, of_rows, indices, ctx.padding_idx)
        return of_weight, None, None


def _add_rows(total: Any, rows: Tensor, indices: Tensor, padding_idx: int) -> None:
    """Add to each row of ``total`` the sum of those of ``rows`` that ``indices`` say are of it.

    Words are numbered, so that the sums of all of them have as many rows as there are indices: how many words there
    are, only their values say. Numbers that are left over have sums of 0, which are added anywhere.
    """
    flat = indices.flatten()
    count = flat.numel()
    words, order = flat.sort(stable=True)
    new = torch.ones_like(words)
    new[1:] = words[1:] != words[:-1]
    number = new.cumsum(0) - 1
    places = torch.arange(count, device=flat.device).scatter(0, number, words)
    numbers = torch.empty_like(number).scatter(0, order, number)
    if padding_idx >= 0:
        numbers = numbers.where(flat != padding_idx, count)
    numbers = numbers.view_as(indices)
    for some in _columns(count, total.shape[1]):
        sums = torch.ops.aten.embedding_dense_backward(rows[..., some], numbers, count + 1, count, False)
        total[:, some].index_add_(0, places, sums[:count])
        del sums  # before the next ones are made


def _add_all(total: Tensor, rows: Tensor, indices: Tensor, padding_idx: int) -> None:
    """The same where there are more indices than words: a gradient of the size of ``total`` is the smaller one."""
    for some in _columns(indices.numel(), total.shape[1]):
        total[:, some].add_(
            torch.ops.aten.embedding_dense_backward(rows[..., some], indices, len(total), padding_idx, False)
        )


def _columns(rows: int, width: int) -> Iterator[slice]:
    """All columns, some at a time."""
    some = max(_AT_ONCE // max(rows, 1), _NARROW)
    for start in range(0, width, some):
        yield slice(start, start + some)


def _keep_indices(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weight, indices, ctx.padding_idx = inputs
    ctx.count = len(weight)
    ctx.save_for_backward(indices)


def _gradient(ctx: Any, of_rows: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    return embedding_gradient(of_rows, indices, ctx.count, ctx.padding_idx), None, None


def embedding_gradient(of_rows: Tensor, indices: Tensor, count: int, padding_idx: int) -> Tensor:
    """The gradient of a weight of ``count`` rows by ATen's kernel, which compilers leave as it is."""
    found: Tensor = torch.ops.memrewrite.embedding_gradient(of_rows, indices, count, padding_idx)
    return found


def _dense(of_rows: Tensor, indices: Tensor, count: int, padding_idx: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(of_rows, indices, count, padding_idx, False)


def _added(total: Tensor, of_rows: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    found = total.clone()
    _add_rows(found, of_rows, indices, padding_idx)
    return found


if not hasattr(torch.ops.memrewrite, "embedding"):
    torch.library.define("memrewrite::embedding", "(Tensor weight, Tensor indices, int padding_idx) -> Tensor")
    torch.library.impl("memrewrite::embedding", "CompositeExplicitAutograd", torch.ops.aten.embedding.default)
    torch.library.register_fake("memrewrite::embedding", torch.ops.aten.embedding.default)
    torch.library.register_autograd("memrewrite::embedding", _gradient, setup_context=_keep_indices)
    gradient = "(Tensor of_rows, Tensor indices, SymInt count, int padding_idx) -> Tensor"
    torch.library.define("memrewrite::embedding_gradient", gradient)
    torch.library.impl("memrewrite::embedding_gradient", "CompositeExplicitAutograd", _dense)
    torch.library.register_fake(
        "memrewrite::embedding_gradient", lambda of_rows, _, count, __: of_rows.new_empty((count, of_rows.shape[-1]))
    )
    onto = "(Tensor{} total, Tensor of_rows, Tensor indices, int padding_idx) -> {}"
    torch.library.define("memrewrite::add_rows", onto.format("(a!)", "()"))
    torch.library.impl("memrewrite::add_rows", "CompositeExplicitAutograd", _add_rows)
    torch.library.register_fake("memrewrite::add_rows", lambda *_: None)
    torch.library.define("memrewrite::rows_added", onto.format("", "Tensor"))
    torch.library.impl("memrewrite::rows_added", "CompositeExplicitAutograd", _added)
    torch.library.register_fake("memrewrite::rows_added", lambda total, *_: torch.empty_like(total))

GRADIENT = torch.ops.memrewrite.embedding_gradient.default
ADD = torch.ops.memrewrite.add_rows.default
ADDED = torch.ops.memrewrite.rows_added.default
