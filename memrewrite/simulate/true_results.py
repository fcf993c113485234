"""Results that PyTorch's shape rules get wrong.

Recurrent layers keep one piece for their backward, the reserve, whose size only the library knows: the rules give it
0 bytes, and it can be half of a step. The layer is run once per signature on real tensors like its arguments.
LayerNorm with weights in float32 keeps the mean and deviation of each row so, which the rules give its input's type.
Backward of BatchNorm makes no gradient of an input that needs none; the rules make it all the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.layers import Layer
from memrewrite.private import FakeTensor, named_arguments, real_tensors
from memrewrite.simulate.transients import like, made

# The operators by name, as not every build of PyTorch has all, and which of their results is the reserve.
_RESERVES = {"aten::_cudnn_rnn": 3, "aten::mkldnn_rnn_layer": 3}
_BYTES: dict[Any, int] = {}


class TrueResults(Layer):
    """While it is active inside a fake mode, operators give what they give for real tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        results = self.below(func, types, args, kwargs)
        if func is torch.ops.aten.native_batch_norm_backward.default:
            mask = named_arguments(func, args, kwargs)["output_mask"]
            return tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True))
        if func is torch.ops.aten.native_layer_norm.default:
            return (results[0], *(_as_precise(of_rows, args[2]) for of_rows in results[1:]))
        position = _RESERVES.get(func.name())
        if position is None or not isinstance(results[position], FakeTensor):
            return results
        call = (func, like(args), like(tuple(kwargs.items())), torch.is_grad_enabled())
        if call not in _BYTES:
            _BYTES[call] = _measured(position, *call)
        reserve: Tensor = results[position]
        return (*results[:position], reserve.new_empty(_BYTES[call] // reserve.itemsize), *results[position + 1 :])


def _as_precise(of_rows: Tensor, weight: Tensor | None) -> Tensor:
    wanted = of_rows.dtype if weight is None else torch.promote_types(of_rows.dtype, weight.dtype)
    return of_rows if of_rows.dtype == wanted else of_rows.new_empty(of_rows.shape, dtype=wanted)


def _measured(position: int, func: Any, args: Any, kwargs: Any, grad: bool) -> int:
    with real_tensors(), torch.set_grad_enabled(grad):
        reserve: Tensor | None = func(*made(args), **{name: made(value) for name, value in kwargs})[position]
        return 0 if reserve is None else reserve.nbytes
