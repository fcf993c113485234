"""Calls with larger sizes than a graph was planned with: where sizes vary, one graph is for all of them.

A plan is for the sizes that were there as the graph was compiled, and its peak grows with them, at least in proportion.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memrewrite.backends.partition import Partition
from memrewrite.records.options import format_bytes
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.torch_internals.partitioning import number


def watched(
    made: Callable[..., Any], inputs: Sequence[Any], partition: Partition, budget: int | None, name: str
) -> Callable[..., Any]:
    """``made``, which warns once where sizes are so much larger than those of ``inputs`` that ``budget`` may not hold;
    ``name`` is what was compiled."""
    planned = {i: number(each) for i, each in enumerate(inputs) if isinstance(each, torch.SymInt)}
    if budget is None or not planned:
        return made
    within = True

    def run(*args: Any) -> Any:
        nonlocal within
        if within and any(args[i] > size for i, size in planned.items()):
            peak = _peak(partition, [args[i] / max(size, 1) for i, size in planned.items()])
            if peak is not None and peak > budget:
                within = False
                larger = next(f"{args[i]}, planned for {size}" for i, size in planned.items() if args[i] > size)
                warnings.warn(
                    f"{name} is called with a larger size ({larger}), so that the step may take {format_bytes(peak)} "
                    f"of {format_bytes(budget)}; compile with dynamic=True and call it with the largest inputs first.",
                    BeyondPlanWarning,
                    stacklevel=2,
                )
        return made(*args)

    return run


def _peak(partition: Partition, ratios: Sequence[float]) -> int | None:
    """The peak of the step in bytes where sizes are so many times what was planned; None where nothing is known."""
    if (peak := partition.peak) is None:
        return None
    stays = partition.base - partition.lives.inputs - partition.lives.earlier
    return int(stays + max(peak - stays, 0) * math.prod(ratios))
