"""The inputs of a step with other sizes, for passes that show what follows from them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from memrewrite.capture.derived import LARGEST
from memrewrite.capture.normal import batch_size
from memrewrite.records.ranges import Range
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.ranges import brought_to, per_token, positions
from memrewrite.workload.step import Inputs


def other_sizes(
    model: nn.Module, inputs: Inputs, ranges: Sequence[Range], other: Callable[[int, int], int], alone: bool = False
) -> Inputs:
    """The inputs with other sizes where they may vary: the batch, all sizes of tokens, those that have ranges.

    ``other`` gives one for a size and its dimension; with ``alone`` the ranges vary and nothing else. Numbers that lead
    up to the batch, as the places do where packed texts end, lead up to the other one, and are one more.
    """
    batch = batch_size(inputs)
    leaves, places = tree_leaves((inputs.args, inputs.kwargs)), positions(model, inputs) if ranges else {}
    named = [(id(leaves[places[each.name]]), each.dim) for each in ranges]

    def changed(leaf: Tensor) -> Tensor:
        dims = {dim for owner, dim in named if owner == id(leaf)}
        if not alone:
            if batch and leads_to(batch, leaf):
                ends = leaf.clamp(max=other(batch, 0))
                return torch.cat([ends, ends[-1:]])
            dims |= {*range(leaf.dim())} if per_token(leaf) else {0} if leaf.dim() and leaf.shape[0] == batch else set()
        return brought_to(leaf, {dim: other(leaf.shape[dim], dim) for dim in dims})

    return inputs.changed(changed)


def leads_to(size: int, leaf: Tensor) -> bool:
    """Whether a row of whole numbers ends with a size that is not its own."""
    whole = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool or leaf.is_meta)
    return whole and leaf.dim() == 1 and leaf.shape[0] not in (0, size) and bool(leaf[-1] == size)


def batch_alone(size: int, dim: int) -> int:
    """About half a size of the batch, and all other sizes as they are."""
    return size if dim else alike(size, dim)


def longer_by_one(length: int, size: int, dim: int) -> int:
    """The length of texts with one token more, and all other sizes as they are."""
    return size + 1 if dim and size == length else size


def alike(size: int, dim: int) -> int:
    """About half a size."""
    return _half_and(size, 0)


def apart(size: int, dim: int) -> int:
    """The same, and of one size another in each dimension."""
    return _half_and(size, dim)


def far_apart(size: int, dim: int) -> int:
    """The same, so far from one another that whatever follows from them differs, too."""
    return _half_and(size, LARGEST * dim)


def a_quarter(size: int, dim: int) -> int:
    """About a quarter, which is filled up to less than a half is, and of one size another in each dimension."""
    quarter = size // 4 + dim
    return quarter if 2 <= quarter < size else _half_and(size, dim)


def a_bit_less(number: int, size: int, dim: int) -> int:
    """For each number below ``LARGEST`` a size that is so little less, in each dimension in another order."""
    few = 1 + (number + dim) % (LARGEST - 1)
    return size if size < 2 else size - few if size - few >= 2 else size + few


def _half_and(size: int, more: int) -> int:
    """About half a size, and so much more; something larger where that is none or the same."""
    half = size // 2 + more
    return size if size < 2 else half if 2 <= half < size else size + 1 + more
