"""What a checkpoint segment needs while it runs. This text is also part of every generated artifact: torch only."""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OWNERS = "_memrewrite_owners"  # the dictionaries that hold the module's parameters


def run_segment(segment: Callable[..., Any], module: torch.nn.Module, *live_ins: Any, random: bool) -> Any:
    """Run ``segment(module, recomputing, *live_ins)`` and keep only its live-ins for backward.

    ``random`` says that the segment draws random numbers, so that recomputation must see the same random state.
    ``recomputing`` is False in the forward pass and True whenever backward runs the segment again, which is how
    buffers are updated exactly once.
    Raises ``RuntimeError`` in backward when the module has other parameters than in the forward pass.
    """
    if not torch.is_grad_enabled():
        return segment(module, False, *live_ins)
    if torch.compiler.is_compiling():  # AOTAutograd functionalizes buffer updates, so they happen once by themselves
        run = functools.partial(segment, module, False)
        return checkpoint(run, *live_ins, use_reentrant=False, preserve_rng_state=random)
    runs = itertools.count()
    parameters = _parameters(module)

    def run_again(*tensors: Any) -> Any:
        recomputing = next(runs) > 0
        if recomputing and not all(map(operator.is_, parameters, _parameters(module))):
            raise RuntimeError("Parameters of the model were replaced between its forward and its backward pass.")
        return segment(module, recomputing, *tensors)

    return checkpoint(run_again, *live_ins, use_reentrant=False, preserve_rng_state=random)


def _parameters(module: torch.nn.Module) -> list[Any]:
    return list(itertools.chain.from_iterable(owner.values() for owner in vars(module).get(OWNERS, ())))


def once(buffer: Tensor, recomputing: bool) -> Tensor:
    """The buffer an operator updates, or a scratch copy nobody reads when the operator runs again.

    Exact for every value, unlike running batch normalization again with momentum 0 (0 times infinity is not a number).
    """
    return torch.empty_like(buffer) if recomputing else buffer
