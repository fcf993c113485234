"""Batch normalization in a checkpoint segment: its statistics stay, and backward applies them again.

To find them takes most of the time: on an H200, cuDNN's batch normalization and a ReLU take 3 to 5 times as long as the
kernel below, which reads once and writes once. Libraries apply statistics by one of a few formulas, which round
differently: the kernel takes the one that gave the bits of the forward pass. Where none did, or there is no Triton, the
whole operator runs again.

Triton, which PyTorch for CUDA brings on Linux, is imported when it is first needed; else this file needs torch only,
because its text is also pasted into generated models.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.runtime.compiled import is_compiled, may_stay
from memrewrite.runtime.segment import Kept, Recomputation, once

_FORMULAS = (0, 1, 2)
_SIMULATED = -1
_POSSIBLE: dict[Any, tuple[int, ...]] = {}  # what formulas may be that of a shape, strides, type and device
_WINDOW = 2**20  # elements that are compared at a time, at most
_TILE = 2048  # elements that a program of the kernel takes


def normalize(recomputing: Any, number: int, rectified: bool, *args: Any) -> Any:
    """``aten.batch_norm(*args)`` in a segment; ``rectified`` says that nothing but ``rectify`` uses the result.

    ``number`` tells it from others in the segment. Running statistics are updated once.
    """
    if not isinstance(recomputing, Recomputation):
        if is_compiled():
            return may_stay(torch.ops.aten.batch_norm.default, args)
        return torch.ops.aten.batch_norm.default(*args)
    kind = functools.partial(_Normalized, rectified)
    return recomputing.keep(number, torch.ops.aten.batch_norm.default, args, {}, False, kind)


def rectify(recomputing: Any, number: int, normalized: Tensor) -> Tensor:
    """``relu_`` of what the ``normalize`` of that number gave, and where that has done it already, only its save."""
    if isinstance(recomputing, Recomputation) and recomputing:
        kept = recomputing.outermost.kept[number]
        if isinstance(kept, _Normalized) and kept.formula is not None:
            recomputing.save(normalized)
            return normalized
    return torch.relu(normalized) if torch.compiler.is_compiling() else torch.relu_(normalized)


class _Normalized(Kept):
    """The statistics that a batch normalization found, and the formula by which it applied them."""

    def __init__(self, rectified: bool, args: tuple[Any, ...]) -> None:
        super().__init__(args)
        self.rectified = rectified
        self.statistics: list[Tensor] = []
        self.formula: int | None = None

    def gave(self, tensor: Tensor) -> bool:
        if super().gave(tensor):
            return True
        if len(self.statistics) < 2:  # the mean, then one over the standard deviation
            self.statistics.append(tensor.detach())
        return False

    def take(self, result: Any, random: Any) -> None:
        (x, weight, bias, *_), self.args = self.args, ()
        if len(self.statistics) == 2:
            with torch.no_grad():
                self.formula = _formula(result, x, self.statistics, weight, bias)

    def give(self, args: tuple[Any, ...]) -> Any:
        return _Applied.apply(self, *args)  # type: ignore[no-untyped-call]

    def apply(self, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *options: Any) -> Tensor:
        """The result again, with nothing saved for backward."""
        if self.formula is not None:
            return apply_statistics(x, self.statistics, weight, bias, self.formula, self.rectified)
        buffers = (None if buffer is None else once(buffer, True) for buffer in (mean, variance))
        result: Tensor = torch.ops.aten.batch_norm.default(x, weight, bias, *buffers, *options)
        return result


class _Applied(torch.autograd.Function):
    """Makes its result need a gradient, so that what comes next saves what it did; backward never comes by."""

    @staticmethod
    def forward(ctx: Any, normalized: _Normalized, *args: Any) -> Tensor:
        return normalized.apply(*args)


def _formula(result: Tensor, x: Tensor, statistics: list[Tensor], weight: Any, bias: Any) -> int | None:
    """The formula that gave ``result``; None where none did, or as long as several may have."""
    if hasattr(x, "fake_mode"):
        return _SIMULATED
    plain = all(type(value) in (Tensor, nn.Parameter) for value in (x, weight, bias))
    if not (plain and as_matrix(x) and x.stride() == result.stride() and kernel_runs_on(x.device)):
        return None
    kind = x.shape, x.stride(), x.dtype, x.device
    possible = _POSSIBLE.get(kind, _FORMULAS)
    if len(possible) > 1:  # otherwise nothing is left to tell
        for given, expected in zip(_windows(x), _windows(result), strict=True):
            if not expected.isfinite().all():
                return None
            tried = (
                (formula, apply_statistics(given, statistics, weight, bias, formula, False)) for formula in possible
            )
            possible = tuple(formula for formula, values in tried if torch.equal(values, expected))
            if len(possible) < 2:
                break
        _POSSIBLE[kind] = possible
    return possible[0] if len(possible) == 1 else None


def _windows(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor (N, C, ...), each of all channels and small beside the whole.

    They are images as they lie there, as the kernel takes them, unless one image is too large.
    """
    if images := _WINDOW // tensor[0].numel():
        yield from tensor.split(images)
        return
    for image in tensor.split(1):
        parts = image.reshape(*image.shape[:2], -1).split(max(_WINDOW // tensor.shape[1], 1), 2)
        yield from (part.contiguous() for part in parts)


@functools.cache
def kernel_runs_on(device: torch.device) -> bool:
    """Whether this is a CUDA device and the kernel runs there."""
    if device.type != "cuda":
        return False
    try:
        values = torch.ones(4, 4, device=device)
        apply_statistics(values, [values[0], values[0]], values[0], values[0], 0, False)
    except Exception:  # no Triton, nothing to compile with, a device that it does not know: the operator has to do
        return False
    return True


def as_matrix(x: Tensor) -> tuple[int, int, bool] | None:
    """The rows and columns of ``x`` (N, C, ...) in the order of its memory, and whether a channel of an image is a row:
    otherwise each channel is a column. None where it is no such matrix, or not of a type normalized in float32.
    """
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.dim() < 2 or not x.numel():
        return None
    if x.dim() > 2 and x.is_contiguous():
        return x.shape[0] * x.shape[1], math.prod(x.shape[2:]), True
    last = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or not x.is_contiguous(memory_format=last):
        return None
    return x.numel() // x.shape[1], x.shape[1], False


def apply_statistics(
    x: Tensor, statistics: Sequence[Tensor], weight: Tensor, bias: Tensor, formula: int, rectified: bool
) -> Tensor:
    """``x`` (N, C, ...) normalized with the ``statistics`` mean and invstd of its channels (C), then ReLU where
    ``rectified``.

    ``formula`` 0 is ((x - mean) * weight) * invstd + bias, 1 is x * scale + (bias - mean * scale) and 2 is
    (x - mean) * scale + bias, where scale is invstd * weight, each with its last product and sum rounded as one.
    Raises ``ValueError`` for what is no matrix.
    """
    result, matrix = torch.empty_like(x), as_matrix(x)
    if formula == _SIMULATED:
        return result
    if matrix is None:
        raise ValueError(f"No kernel normalizes {x.dtype} {tuple(x.shape)} with strides {x.stride()}.")
    rows, columns, by_row = matrix
    wide = min(1 << (columns - 1).bit_length(), _TILE)
    tall = _TILE // wide
    tensors = (x, result, *statistics, weight, bias)
    with torch.cuda.device_of(x):
        grid = (-(-rows // tall), -(-columns // wide))
        _kernel()[grid](
            *tensors, rows, columns, x.shape[1], formula, int(rectified), by_row, tall, wide, enable_fp_fusion=False
        )
    return result


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["rows", "channels", "formula", "rectified"])  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        x_at, y_at, mean_at, invstd_at, weight_at, bias_at, rows, columns, channels, formula, rectified,
        by_row: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * tall + tl.arange(0, tall)[:, None]
        column = tl.program_id(1) * wide + tl.arange(0, wide)[None, :]
        inside = (row < rows) & (column < columns)
        place = row.to(tl.int64) * columns + column
        x = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32)
        channel = (row if by_row else column) % channels
        mean, invstd = tl.load(mean_at + channel), tl.load(invstd_at + channel)
        weight, bias = tl.load(weight_at + channel).to(tl.float32), tl.load(bias_at + channel).to(tl.float32)
        scale = invstd * weight
        if formula == 0:
            factor, other, added = (x - mean) * weight, invstd, bias
        elif formula == 1:
            factor, other, added = x, scale, bias - mean * scale
        else:
            factor, other, added = x - mean, scale, bias
        y = tl.fma(factor, tl.broadcast_to(other, factor.shape), tl.broadcast_to(added, factor.shape))
        if rectified != 0:
            y = tl.where(y != y, y, tl.maximum(y, 0.0))
        tl.store(y_at + place, y.to(y_at.dtype.element_ty), mask=inside)

    return kernel
