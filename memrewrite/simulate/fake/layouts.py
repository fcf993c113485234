"""In which order of dimensions the CPU's kernels lay out results that are like their arguments, element by element.

PyTorch's shape rules are written apart from the kernels, and many give another order where arguments lie differently,
or none is contiguous: backward copies then what it was foretold to take as it is, or the other way round. Where sizes
play no part, the kernel itself is asked, on tensors of two elements per dimension that lie as the arguments do.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.records.tensor_like import TensorLike
from memrewrite.targets.transients import made
from memrewrite.torch_internals.dispatch_modes import PLAIN
from memrewrite.torch_internals.fake_tensors import FakeTensor, real_tensors
from memrewrite.torch_internals.operators import OpOverload, aliases_arguments

_CPU = torch.device("cpu")
# Per call: for each result the dimensions from the outermost in memory to the innermost; None where that is not known.
_ORDERS: dict[Any, tuple[tuple[int, ...] | None, ...]] = {}


def laid_out_as_by_kernels(results: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The fake results of an operator in the order of dimensions that its kernel for the CPU gives them."""
    if not _may_differ(func) or not _lie_apart(args):
        return results
    each = results if isinstance(results, tuple) else (results,)
    first = each[0]
    if type(first) is not FakeTensor or first.fake_device != _CPU or first.dim() < 2:
        return results
    call = _small(func, args, kwargs, tuple(first.shape))
    if call is None:
        return results
    if call not in _ORDERS:
        _ORDERS[call] = _asked(call, len(each))
    placed = tuple(_in_order(*pair, first.shape) for pair in zip(each, _ORDERS[call], strict=True))
    return placed if isinstance(results, tuple) else placed[0]


@functools.cache
def _may_differ(func: Any) -> bool:
    """Whether an operator of PyTorch's makes new tensors."""
    return isinstance(func, OpOverload) and func.namespace == "aten" and not aliases_arguments(func)


def _lie_apart(args: tuple[Any, ...]) -> bool:
    """Whether an argument is not contiguous; where all are, so are results."""
    return any(isinstance(arg, Tensor) and arg.layout is torch.strided and not arg.is_contiguous() for arg in args)


def _small(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    """The call with two elements in place of more per dimension; None where tensors are not like the result."""
    given: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            small = _shrunk(arg, shape)
            if small is None:
                return None
            given.append(small)
        elif type(arg) in PLAIN or _are_plain(arg):
            given.append(tuple(arg) if isinstance(arg, list) else arg)
        else:
            return None
    positional = tuple(given[: len(args)])
    return func, positional, tuple(zip(kwargs, given[len(args) :], strict=True)), tuple(min(size, 2) for size in shape)


def _are_plain(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(item) in PLAIN for item in value)


def _shrunk(tensor: Tensor, shape: tuple[int, ...]) -> TensorLike | None:
    """A small tensor that lies as this one, which ``shape`` is made of; None where it is not, or lies over itself."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.device != _CPU:
        return None
    sizes = tensor.shape
    if any(type(size) is not int for size in (*sizes, *shape)) or 0 in shape or len(sizes) > len(shape):
        return None
    if any(size not in (1, wanted) for size, wanted in zip(reversed(sizes), reversed(shape), strict=False)):
        return None
    strides = _strides(sizes, tensor.stride())
    return None if strides is None else TensorLike(tuple(min(n, 2) for n in sizes), strides, tensor.dtype, _CPU)


def _strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Strides in the order of these, with gaps where they have some, for two elements in place of more."""
    steps, now, full = {0: 0, 1: 1}, 1, 1  # new strides by old ones; how far both reach
    for dim in sorted(_longer(sizes), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] == 0:
            continue
        if strides[dim] < full:
            return None
        now *= 1 if strides[dim] == full else 2
        steps[strides[dim]] = now
        now, full = now * 2, strides[dim] * sizes[dim]
        steps[full] = now
    return tuple(steps[max(step for step in steps if step <= stride)] for stride in strides)


def _asked(call: Any, count: int) -> tuple[tuple[int, ...] | None, ...]:
    """The order of each result of a call on real tensors; what does not run on such values is not known."""
    func, args, kwargs, shape = call
    try:
        with real_tensors(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            results = func(*map(made, args), **{name: made(value) for name, value in kwargs})
    except RuntimeError:
        return (None,) * count
    each = results if isinstance(results, tuple) else (results,)
    return tuple(_order(result, shape) for result in each)


def _order(result: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if not isinstance(result, Tensor) or tuple(result.shape) != shape or result.layout is not torch.strided:
        return None
    order = _outermost_first(result)
    return order if _fills_its_storage(result, order) else None


def _fills_its_storage(tensor: Tensor, order: Sequence[int]) -> bool:
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return whole and all(tensor.stride(dim) == step for dim, step in _packed(tensor.shape, order))


def _outermost_first(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions of more than one element, from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(_longer(tensor.shape), key=lambda dim: (-strides[dim], dim)))


def _longer(sizes: Sequence[int]) -> list[int]:
    return [dim for dim, size in enumerate(sizes) if size > 1]


def _packed(sizes: Sequence[int], order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Dimensions and their strides where nothing lies between elements."""
    step = 1
    for dim in reversed(order):
        yield dim, step
        step *= sizes[dim]


def _in_order(result: Any, order: tuple[int, ...] | None, shape: Sequence[int]) -> Any:
    """The result itself where it has that order, or another one on memory of its own."""
    if order is None or not isinstance(result, Tensor) or result.shape != shape:
        return result
    wanted = dict(_packed(shape, order))
    if all(result.stride(dim) == step for dim, step in wanted.items()):
        return result
    return result.new_empty_strided(shape, [wanted.get(dim, 1) for dim in range(len(shape))])
