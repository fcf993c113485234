"""What backward of attention and the sums of rows take on CUDA while they run, by the sources of the kernels.

The latter as on a Hopper device. Not modelled: workspaces of convolutions, and what attention by cuDNN takes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from memrewrite.targets.allocator import rounded
from memrewrite.targets.transients import NOTHING, Taken, Transients
from memrewrite.torch_internals.operators import named_arguments

_HALF = (torch.float16, torch.bfloat16)


class Scratch(Transients):
    """What backward of attention and sums of rows take while they run; other operators count as taking nothing."""

    def __init__(self) -> None:
        super().__init__(lambda calls: [Taken()] * len(calls))

    @property
    def edition(self) -> object:
        """The sources stay what they are."""
        return type(self)

    def lookup(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
        """Bytes by the sources of the kernels."""
        count = _SCRATCH.get(func)
        return NOTHING if count is None else Taken(count(named_arguments(func, args, kwargs)))


def _flash_backward(given: dict[str, Any]) -> int:
    """``mha_bwd`` of flash attention: float32 sums of the gradient of q, a float per row, rows in blocks of 128.

    Where heads share k and v, their gradients for every head.
    """
    batch, heads, rows, depth = given["query"].shape
    columns, item = given["key"].shape[2], given["key"].element_size()
    rows, depth = rounded(rows, 128), rounded(depth, 32 if depth <= 128 else 64)
    shared = 2 * columns * given["key"].shape[3] * item if given["key"].shape[1] != heads else 0
    return int(batch * heads * (rows * depth * 4 + rows * 4 + shared))


def _efficient_backward(given: dict[str, Any]) -> int:
    """``kernel_backward.h``: a float32 per row, and float32 gradients in half precision, of q and in deep heads."""
    batch, heads, rows, depth = given["query"].shape
    columns = given["key"].shape[2]
    sums = rounded(rows, 64) * depth + (2 * columns * depth if depth > 128 else 0)
    return int(batch * heads * 4 * (rows + (sums if given["query"].dtype in _HALF else 0)))


def _sum(given: dict[str, Any]) -> int:
    """``setReduceConfig`` in ``Reduce.cuh``, where the rows of a dense tensor are added up, as biases' gradients are.

    As many blocks of threads as the device runs at once share the rows, and meet through memory.
    """
    source, dims = given["self"], given["dim"]
    reduced = {dim % source.dim() for dim in dims or range(source.dim())}
    kept = [dim for dim, size in enumerate(source.shape) if dim not in reduced and size > 1]
    columns = math.prod(source.shape[dim] for dim in kept)
    rows = source.numel() // columns if columns else 0
    above = all(dim < min(kept, default=0) for dim in reduced if source.shape[dim] > 1)
    if rows < 2 or not (above and source.is_contiguous() and source.is_floating_point()):
        return 0
    vector = math.gcd(columns, _VECTOR)
    width = columns // vector
    across = min(_power(width), _WARP)
    down = min(_power(rows), _BLOCK // vector // across)
    across = min(_power(width), _BLOCK // vector // down)
    per_thread, blocks = -(-rows // down), -(-width // across)
    at_once = _PROCESSORS * (_THREADS // (across * down))
    if per_thread < _MANY or blocks > at_once:
        return 0
    sharing = max(min(-(-at_once // blocks), -(-per_thread // _FEW)), -(-per_thread // _MANY))
    partial = max(source.element_size(), 4) * columns * sharing * across * vector
    return rounded(partial) + rounded(4 * blocks) if sharing > 1 else 0


def _power(size: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (size.bit_length() - 1)


_PROCESSORS, _THREADS = 132, 2048  # of a Hopper device: multiprocessors, and the threads that each runs at once
_VECTOR, _WARP, _BLOCK = 4, 32, 512  # what a thread reads at once, threads beside each other, threads of a block
_FEW, _MANY = 16, 256  # rows that a thread adds up

_SCRATCH: dict[Any, Callable[[dict[str, Any]], int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    torch.ops.aten.sum.dim_IntList: _sum,
}
