"""Results that PyTorch's shape rules get wrong.

Recurrent layers keep one piece for their backward, the reserve, whose size only the library knows: the rules give it
0 bytes, and it can be half of a step. The layer is run once per signature on real tensors like its arguments.
Normalizations with weights or running statistics in float32 keep the mean and deviation of each row or channel so,
which the rules give the input's type; CUDA's kernels keep those of rows so whatever they are given.
Backward of GroupNorm gives the input's type all the same, that of BatchNorm no gradient of an input that needs none.
BatchNorm's kernels for the CPU, as cuDNN's, give what they normalize, and its gradient, contiguous or with channels
last, whichever the input is closer to; the rules give the order of dimensions that the input or the gradient has.
The mean or sum of a loss (MSE, smooth L1, binary cross-entropy) is one number in the memory that its terms had, where
the rules give it some of its own. So is a fold, or an unfold of few patches, in the memory of as much as it was given.
The other rules here are of layouts where sizes play a part; ``layouts`` has the general one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.simulate.fake.layouts import laid_out_as_by_kernels
from memrewrite.targets.eager import EAGER, Target
from memrewrite.targets.transients import like, made
from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.fake_tensors import FakeTensor, real_tensors, suggested_format
from memrewrite.torch_internals.operators import named_arguments

_BYTES: dict[Any, int] = {}


class TrueResults(Layer):
    """While it is active inside a fake mode, operators give what they give for real tensors, on ``target``."""

    def __init__(self, target: Target = EAGER) -> None:
        super().__init__()
        self._in_float32 = target.rows_in_float32

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        results = self.below(func, types, args, kwargs)
        rule = _rule(func, self._in_float32)
        if rule is not None:
            results = rule(results, func, args, dict(kwargs))
        return laid_out_as_by_kernels(results, func, args, kwargs)


def _normalized(results: Any, func: Any, args: Any, kwargs: Any) -> Any:
    result, *statistics = _precise((1, 3), results, func, args, kwargs)
    return (_in_format_of(args[0], result), *statistics)


def _only_wanted(results: Any, func: Any, args: Any, kwargs: Any) -> Any:
    named = named_arguments(func, args, kwargs)
    gradient, *others = (
        result if wanted else None for result, wanted in zip(results, named["output_mask"], strict=True)
    )
    return (_in_format_of(named["input"], gradient), *others)


def _in_format_of(given: Tensor, result: Tensor | None) -> Tensor | None:
    """The result in the memory format that ``given`` is closer to, on the CPU."""
    if result is None or result.device.type != "cpu":
        return result
    return _laid_out(result, suggested_format(given))


def _laid_out(result: Tensor, wanted: torch.memory_format) -> Tensor:
    return result if result.is_contiguous(memory_format=wanted) else torch.empty_like(result, memory_format=wanted)


def _like_the_input(results: Any, func: Any, args: Any, kwargs: Any) -> Any:
    gradient, *others = results
    return (None if gradient is None else _of_type(gradient, args[1].dtype), *others)


def _precise(
    deciding: tuple[int, ...], results: Any, func: Any, args: Any, kwargs: Any, least: torch.dtype | None = None
) -> Any:
    """With statistics of the widest type among the input and the arguments at the ``deciding`` positions.

    They have that of the rules, or the ``least``, where it is wider.
    """
    given = [args[position].dtype for position in deciding if args[position] is not None]
    given += [] if least is None else [least]
    wanted = functools.reduce(torch.promote_types, given, args[0].dtype)
    kept = ((statistic, torch.promote_types(wanted, statistic.dtype)) for statistic in results[1:])
    return (results[0], *(_of_type(statistic, dtype) for statistic, dtype in kept))


def _in_memory_of_terms(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    named = named_arguments(func, args, kwargs)
    if not result.dim() and named["reduction"]:
        terms = torch.broadcast_shapes(named["self"].shape, named["target"].shape)
        return result.new_empty(terms).as_strided((), ())
    return result


def _in_memory_of_argument(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """In memory that was made for as much as the first argument, which is not given back where that is more."""
    return _in_memory_of(result, args[0].numel())


def _bags(results: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """On the CPU there is memory for one index more, and for one size more where the last offset is the end."""
    embedded, bags, counts, largest = results
    if bags.device.type != "cpu":
        return results
    ends = named_arguments(func, args, kwargs)["include_last_offset"]
    bags = _in_memory_of(bags, bags.numel() + 1) if bags.numel() else bags
    return embedded, bags, _in_memory_of(counts, counts.numel() + ends), largest


def _in_memory_of(result: Tensor, count: int) -> Tensor:
    return result.new_empty(count).as_strided(result.shape, result.stride()) if count > result.numel() else result


def _conjugated(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Marked so, also where a number was given: what reads it makes a copy that is not."""
    return result if isinstance(args[0], Tensor) else func(result)


def _contiguous(results: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The first one is, on the CPU."""
    first, *others = results if isinstance(results, tuple) else (results,)
    placed = _laid_out(first, torch.contiguous_format) if first is not None and first.device.type == "cpu" else first
    return (placed, *others) if others else placed


def _as_argument(name: str, result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """In the memory format that the argument of that name is closer to."""
    return _in_format_of(named_arguments(func, args, kwargs)[name], result)


def _of_type(result: Tensor, dtype: torch.dtype) -> Tensor:
    return result if result.dtype == dtype else result.new_empty(result.shape, dtype=dtype)


def _with_reserve(position: int, results: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """With as much at ``position`` as the library keeps there for backward."""
    if not isinstance(results[position], FakeTensor):
        return results
    call = (func, like(args), like(tuple(kwargs.items())), torch.is_grad_enabled())
    if call not in _BYTES:
        _BYTES[call] = _measured(position, *call)
    reserve: Tensor = results[position]
    return (*results[:position], reserve.new_empty(_BYTES[call] // reserve.itemsize), *results[position + 1 :])


def _measured(position: int, func: Any, args: Any, kwargs: Any, grad: bool) -> int:
    with real_tensors(), torch.set_grad_enabled(grad):
        reserve: Tensor | None = func(*made(args), **{name: made(value) for name, value in kwargs})[position]
        return 0 if reserve is None else reserve.nbytes


# By name, as not every build of PyTorch has all operators.
_RULES: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "aten::_cudnn_rnn": functools.partial(_with_reserve, 3),
    "aten::mkldnn_rnn_layer": functools.partial(_with_reserve, 3),
    "aten::native_layer_norm": functools.partial(_precise, (2,)),
    "aten::native_group_norm": functools.partial(_precise, (1,)),
    "aten::native_batch_norm": _normalized,
    "aten::native_group_norm_backward": _like_the_input,
    "aten::native_batch_norm_backward": _only_wanted,
    "aten::mse_loss": _in_memory_of_terms,
    "aten::smooth_l1_loss": _in_memory_of_terms,
    "aten::binary_cross_entropy": _in_memory_of_terms,
    "aten::soft_margin_loss": _in_memory_of_terms,
    "aten::_conj": _conjugated,
    "aten::col2im": _in_memory_of_argument,
    "aten::im2col": _in_memory_of_argument,
    "aten::_embedding_bag": _bags,
    "aten::_embedding_bag_forward_only": _bags,
    "aten::glu_backward": _contiguous,
    "aten::native_layer_norm_backward": _contiguous,
    "aten::channel_shuffle": functools.partial(_as_argument, "self"),
    "aten::max_unpool2d": functools.partial(_as_argument, "self"),
    "aten::reflection_pad3d": functools.partial(_as_argument, "self"),
    "aten::replication_pad3d": functools.partial(_as_argument, "self"),
    "aten::reflection_pad2d_backward": functools.partial(_as_argument, "self"),
    "aten::reflection_pad3d_backward": functools.partial(_as_argument, "self"),
    "aten::replication_pad2d_backward": functools.partial(_as_argument, "self"),
    "aten::replication_pad3d_backward": functools.partial(_as_argument, "self"),
}


_OF_ROWS = {"aten::native_layer_norm": functools.partial(_precise, (2,), least=torch.float32)}


@functools.cache
def _rule(func: Any, in_float32: bool) -> Callable[[Any, Any, Any, Any], Any] | None:
    name = func.name()
    return (_OF_ROWS.get(name) if in_float32 else None) or _RULES.get(name)
