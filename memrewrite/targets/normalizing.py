"""The kernel that applies statistics of batch normalizations again, compiled before it is needed.

Triton compiles it for each width of its tiles, a fifth of a second each, and most of that holds no lock of Python's.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from memrewrite.records.tensor_like import TensorLike
from memrewrite.runtime.batch_norm import apply_statistics, as_matrix, kernel_runs_on

_TRAINING = 5  # the position of that argument in all operators that normalize a batch


def compiling(calls: Iterable[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> list[Callable[[], object]]:
    """What compiles the kernel for each width that ``calls`` of operators may ask for."""
    small: dict[tuple[TensorLike, torch.dtype], None] = {}
    for func, args, _ in calls:
        normalizes = "batch_norm" in func.__name__ and "backward" not in func.__name__
        if normalizes and len(args) > _TRAINING and args[_TRAINING] is True and isinstance(args[1], TensorLike):
            x, weight = args[:2]
            if (like := _of_one_tile(x)) is not None:
                small[like, weight.dtype] = None
    return [partial(_compile, *each) for each in small]


def _of_one_tile(x: TensorLike) -> TensorLike | None:
    """The smallest input for which the kernel is what it is for ``x``; None where it takes none such."""
    matrix = as_matrix(torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta"))
    if matrix is None:
        return None
    _, columns, by_row = matrix
    if by_row:
        return TensorLike((1, 1, columns), (columns, columns, 1), x.dtype, x.device)
    return TensorLike((1, columns), (columns, 1), x.dtype, x.device)


def _compile(x: TensorLike, weight: torch.dtype) -> None:
    if not kernel_runs_on(x.device):
        return
    channels = torch.ones(x.shape[1], dtype=torch.float32, device=x.device)
    learned = channels.to(weight)
    apply_statistics(x.filled(1), [channels, channels], learned, learned, 0, False)
