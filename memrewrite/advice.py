"""What else would fit when no plan does: each suggestion simulated, none guessed."""

import math
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from memrewrite.capture.normal import batch_size
from memrewrite.errors import BudgetInfeasibleError, MemrewriteError
from memrewrite.measuring import predict
from memrewrite.options import format_bytes
from memrewrite.pipeline import Line
from memrewrite.private import tree_map
from memrewrite.runtime.dropin import FallbackWarning
from memrewrite.step import Inputs, Step


def infeasible(line: Line, budget: int, lowest: int) -> BudgetInfeasibleError:
    """The error for a budget in bytes that the line's lowest plan (marked on its graph) does not meet."""
    message = (
        f"No plan fits {format_bytes(budget)}: the lowest reachable peak is {format_bytes(lowest)} "
        f"({_floor(line)}). What else would fit:"
    )
    options = [*_smaller_batches(line, budget), *_leaner_steps(line, budget)]
    lines = tuple(f"  - {option}" for option in options)
    return BudgetInfeasibleError(message, lowest, lines or ("  - nothing that was tried; a smaller model.",))


def _floor(line: Line) -> str:
    """What the peak is made of, largest first."""
    categories = line.simulate().categories
    largest = sorted(categories.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)


def _smaller_batches(line: Line, budget: int) -> list[str]:
    """The largest halved batch whose lowest plan fits, as micro-batches with gradient accumulation."""
    batch = batch_size(line.inputs)
    parts = 2
    while batch is not None and batch // parts >= 2:
        size = batch // parts
        peak = _peak(line, line.step, _first(line.inputs, batch, size))
        if peak <= budget:
            return [
                f"{parts} micro-batches of {size} with gradient accumulation: {format_bytes(int(peak))} "
                "(batch normalization then sees the smaller batch)"
            ]
        parts *= 2
    return []


def _leaner_steps(line: Line, budget: int) -> list[str]:
    """The same plan under bfloat16 autocast, under SGD, and under both, as far as they fit."""
    lean = {
        "bfloat16 autocast (--amp bf16)": replace(line.step, amp=torch.bfloat16),
        "SGD without momentum (--optimizer sgd)": replace(line.step, optimizer=torch.optim.SGD),
        "both bfloat16 autocast and SGD": replace(line.step, amp=torch.bfloat16, optimizer=torch.optim.SGD),
    }
    if line.step.mode == "inference":
        return []
    found = []
    for name, step in lean.items():
        if step != line.step and (peak := _peak(line, step, line.inputs)) <= budget:
            found.append(f"{name}: {format_bytes(int(peak))}")
    return found


def _peak(line: Line, step: Step, inputs: Inputs) -> float:
    """The peak in bytes, infinite where the rewritten forward, or the model itself, does not take these inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        try:
            return predict(line.build(), inputs, step, workspace_bytes=line.workspace).peak
        except (FallbackWarning, MemrewriteError, RuntimeError, ValueError, TypeError, IndexError):
            return math.inf


def _first(inputs: Inputs, batch: int, size: int) -> Inputs:
    """The first ``size`` samples."""

    def cut(leaf: object) -> object:
        return leaf[:size] if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch else leaf

    return Inputs(tree_map(cut, inputs.args), tree_map(cut, inputs.kwargs))
