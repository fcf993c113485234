"""Operators whose results have sizes of their arguments: what they gave once tells what they give for other sizes.

A step with another batch, or a model whose layers have other channels each, asks fake tensors for the same operators in
other sizes. To run them there takes up to ten milliseconds, as those of batch normalization, which are made of others.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memrewrite.torch_internals.versions import private_imports

with private_imports():
    from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
# Besides those that work element by element.
_OF_ROWS = {
    *(_aten.native_batch_norm.default, _aten.native_batch_norm_backward.default),
    _aten._native_batch_norm_legit.default,
    *(_aten.cudnn_batch_norm.default, _aten.cudnn_batch_norm_backward.default),
    *(_aten.native_layer_norm.default, _aten.native_layer_norm_backward.default),
    *(_aten.addmm.default, _aten.mm.default, _aten.bmm.default),
}
# Their results lie in memory as arguments without gaps do, if none of these lies in another order.
_OF_PLAIN_ROWS = {_aten.convolution_backward.default}
Order = tuple[tuple[int, ...], tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes by number, those of 0 and 1 as they are, and the order in which a tensor's dimensions lie in memory."""

    shape: tuple[int, ...]
    order: Order

    @property
    def plain(self) -> bool:
        """Whether a tensor lies in memory row by row, without gaps."""
        return self.order[0] == tuple(range(len(self.shape))) and not any(self.order[1])

    def at(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and the strides of a tensor without gaps."""
        shape = tuple(size if size >= 0 else sizes[~size] for size in self.shape)
        stride, length = [0] * len(shape), 1
        for dim in reversed(self.order[0]):
            stride[dim] = length
            length *= max(shape[dim], 1)
        return shape, tuple(stride)


class Sizes:
    """The distinct sizes of a call, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    @property
    def all(self) -> list[int]:
        """All that were met."""
        return [*self._numbers]

    def form(self, shape: Iterable[int], stride: Sequence[int]) -> Form | None:
        """The form of an argument; None where its elements share memory."""
        shape = tuple(shape)
        order = _order(shape, stride)
        numbers = self._numbers
        found = tuple([size if size < 2 else ~numbers.setdefault(size, len(numbers)) for size in shape])
        return None if order is None else Form(found, order)

    def form_of_result(self, shape: Sequence[int], stride: Sequence[int]) -> Form | None:
        """The form of a result; None where it has gaps, or a size that no argument has."""
        order = _order(shape, stride)
        if order is None or any(order[1]) or any(size > 1 and size not in self._numbers for size in shape):
            return None
        return self.form(shape, stride)


def _order(shape: Sequence[int], stride: Sequence[int]) -> Order | None:
    """The dimensions from the outermost to the innermost, and which have gaps; None where elements share memory."""
    dims = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    gaps, length = [], 1
    for dim in reversed(dims):
        size, step = shape[dim], stride[dim]
        if step < length and size > 1:
            return None
        gaps.append(step != length)
        length = step * size if size > 1 else length
    return tuple(dims), tuple(gaps)


@functools.cache
def passes_sizes_on(func: Any) -> bool:
    """Whether the sizes of an operator's results are sizes of its arguments, whatever these are."""
    return func.namespace == "aten" and (func in _OF_ROWS | _OF_PLAIN_ROWS or torch.Tag.pointwise in func.tags)


def form_of(known: tuple[Any, ...], func: Any, args: tuple[Any, ...], kwargs: Any, sizes: Sizes) -> Any:
    """What a call has in common with those that differ in ``sizes``, which get its own; None where that tells nothing.

    ``known`` is what else it depends on.
    """
    words = [*known]
    said = _say(args, words, sizes) and _say(kwargs.items(), words, sizes)
    forms = (word for word in words if isinstance(word, Form))
    if not said or (func in _OF_PLAIN_ROWS and not all(form.plain for form in forms)):
        return None
    return (func, *words)


def _say(values: Iterable[Any], words: list[Any], sizes: Sizes) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if (form := sizes.form(value.shape, value.stride())) is None:
                return False
            words += (value.dtype, value.requires_grad, value.fake_device, form)
        elif kind is list or kind is tuple:
            words += (kind, len(value))
            if not _say(value, words, sizes):
                return False
        elif kind is torch.SymInt:
            return False
        else:
            words += (kind, value)
    return True
