"""Backward while gradients are there already: those of micro-batches before, or filled with zeros in place.

A plan is for the loop of PyTorch's tutorials, in which backward makes the first ones.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.backends.calls import recorded
from memrewrite.backends.partition import Partition
from memrewrite.records.options import format_bytes
from memrewrite.runtime.promise import BeyondPlanWarning


def watched(
    made: Callable[..., Any], inputs: Sequence[Any], partition: Partition, budget: int | None, name: str
) -> Callable[..., Any]:
    """``made``, which warns once where gradients are there so that ``budget`` may not hold; ``name`` is what was
    compiled.

    Those of later graphs count anyway, and so do all while the optimizer works; a reserve may be for the rest.
    """
    peak, all_there = partition.peak, partition.lives.gradients - partition.lives.others
    more = all_there - partition.asked.reserve
    trained = next((i for i, each in enumerate(inputs) if isinstance(each, nn.Parameter) and each.requires_grad), None)
    if budget is None or trained is None or peak is None or not max(budget - more, partition.at_optimizer) < peak:
        return made
    pending = [
        f"{name} runs backward while gradients are there, of micro-batches before or zeroed in place, so that the step "
        f"may take {format_bytes(peak + more)} of {format_bytes(budget)}; compile with reserve={all_there}."
    ]

    def run(*args: Any) -> Any:
        results = made(*args)
        if pending and args[trained].grad is not None and torch.is_grad_enabled():
            for each in recorded(results):
                each.register_hook(functools.partial(look, args[trained]))
        return results

    def look(weight: nn.Parameter, _: Tensor) -> None:
        if pending and weight.grad is not None:
            warnings.warn(pending.pop(), BeyondPlanWarning, stacklevel=2)

    return run
