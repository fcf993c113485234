"""What backward of attention, embeddings and compiled chains and the sums of rows take on CUDA while they run, by the
sources of the kernels.

The latter two as on a Hopper device. Not modelled: workspaces of convolutions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.runtime.fused import CHAINS
from memrewrite.targets.allocator import rounded
from memrewrite.targets.transients import NOTHING, Taken, Transients
from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.operators import named_arguments, returns_view

_HALF = (torch.float16, torch.bfloat16)


class Scratch(Transients):
    """What those operators take while they run; others count as taking nothing."""

    def __init__(self) -> None:
        super().__init__(lambda calls: [Taken()] * len(calls))

    @property
    def table(self) -> object:
        """The sources stay what they are."""
        return type(self)

    @property
    def empty(self) -> bool:
        """No: nothing is to be measured."""
        return False

    def lookup(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
        """Bytes by the sources of the kernels."""
        count = _SCRATCH.get(func)
        taken = 0 if count is None else count(named_arguments(func, args, kwargs))
        return Taken(taken) if taken else NOTHING


def _flash_backward(given: dict[str, Any]) -> int:
    """``mha_bwd`` of flash attention: float32 sums of the gradient of q, a float per row, rows in blocks of 128.

    Where heads share k and v, their gradients for every head. Attention by cuDNN, which PyTorch prefers on Hopper
    devices, was measured to take the same (``tests/targets/test_cuda_scratch.py``); there is no source to read.
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


def _embedding_backward(given: dict[str, Any]) -> int:
    """``embedding_dense_backward_cuda`` and ``EmbeddingBackwardKernel.cu``: words are sorted, and rows added up in two
    steps, the first of which makes a float32 row of up to ten rows of one word each. How many there are is not known
    without the words: as many as there could be.

    Newer PyTorch adds them up otherwise where few words come often, in what is smaller.
    """
    rows, words, width = given["indices"].numel(), given["num_weights"], given["grad_output"].shape[-1]
    item, index = given["grad_output"].element_size(), given["indices"].element_size()
    copied = 0 if given["grad_output"].is_contiguous() else rounded(rows * width * item)
    if rows <= _FEW_WORDS and not given["scale_grad_by_freq"]:
        return copied
    different = min(rows, words)
    sums = rows // _ROWS_OF_A_WORD + different
    lists = [rows] * (5 if given["scale_grad_by_freq"] else 4) + [different] * 2 + [sums]
    return copied + rounded(sums * width * max(item, 4)) + sum(rounded(each * index) for each in lists)


def _chain_backward(given: dict[str, Any]) -> int:
    """What Inductor's code for a chain's gradients holds between its kernels: one alone, or three where a weight gets a
    gradient, along rows, across them, and one that ends the sums of the second.

    That is what the first finds of each row for the second, a float32 for each sum or mean along rows, and sums of
    some rows by the second. Whatever else both need, both compute (``memrewrite.runtime.kernels``). A chain's forward,
    of one kernel, takes nothing.
    """
    tensors, wanted = given["given"], tuple(given["wanted"])
    asked = given["name"], wanted, tuple((t.dtype, t.shape, t.stride()) for t in tensors)
    if asked not in _HELD:
        _HELD[asked] = _held(given["name"], tensors, wanted)
    return _HELD[asked]


_HELD: dict[Any, int] = {}  # by chains, whose names say what they compute, and what they are given


def _held(name: str, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> int:
    largest = max(tensor.numel() for tensor in tensors)
    sizes = [tensor.numel() for tensor, wanted in zip(tensors, wanted, strict=True) if wanted]
    weights = [size for size in sizes if 0 < size < largest]
    with _AlongRows() as along:
        CHAINS[name](*tensors)
    of_rows = [rounded(4 * rows) for rows in along.found if weights]
    return sum(of_rows) + sum(_sums_across(size, largest // size) for size in weights)


def _sums_across(columns: int, rows: int) -> int:
    """At most, by ``num_splits`` in ``torch/_inductor/ir.py`` and ``reduction_split_factor`` in ``choices.py``.

    As many blocks as run at once, each of 128 columns, share the rows; a thread adds up some of them, four at a time,
    of which there are up to 19 less than would make the blocks even, or up to 49 less than 512.
    """
    if columns >= 64 * _PROCESSORS or rows <= _FEWEST:
        return 0
    blocks = -(-_PROCESSORS * _THREADS // 256 // -(-columns // 128))
    times = min(max(-(-rows // (4 * blocks)) - 19, _FEWEST), 512 - 49)
    return rounded(4 * columns * -(-rows // (4 * times)))


class _AlongRows(Layer):
    """Counts rows, once for each operator that makes one number of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = self.below(func, types, args, kwargs or {})
        if isinstance(result, Tensor) and args and isinstance(args[0], Tensor) and not returns_view(func):
            size = args[0].shape
            if size[-1:] != (1,) and result.shape == (*size[:-1], 1) and size:
                self.found.append(result.numel())
        return result


def _power(size: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (size.bit_length() - 1)


_PROCESSORS, _THREADS = 132, 2048  # of a Hopper device: multiprocessors, and the threads that each runs at once
_VECTOR, _WARP, _BLOCK = 4, 32, 512  # what a thread reads at once, threads beside each other, threads of a block
_FEW, _MANY = 16, 256  # rows that a thread adds up
_FEW_WORDS, _ROWS_OF_A_WORD = 3072, 10  # for which nothing is sorted, and that the first step adds up
_FEWEST = 32  # rows that a thread of Inductor's adds up

_SCRATCH: dict[Any, Callable[[dict[str, Any]], int]] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    torch.ops.aten.embedding_dense_backward.default: _embedding_backward,
    torch.ops.aten.sum.dim_IntList: _sum,
    torch.ops.memrewrite.chain_slopes.default: _chain_backward,
}
