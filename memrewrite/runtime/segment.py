"""What a checkpoint segment needs while it runs. This text is also part of every generated artifact: torch only."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OWNERS = "_memrewrite_owners"  # where the module keeps its parameters: full name -> (dictionary, name in there)


def run_segment(
    segment: Callable[..., Any], module: torch.nn.Module, *live_ins: Any, random: bool, reads: tuple[str, ...] = ()
) -> Any:
    """Run ``segment(module, recomputing, *live_ins)`` and keep only its live-ins for backward.

    ``random`` says that the segment draws random numbers, so that recomputation must see the same random state;
    ``reads`` names the parameters it reads. ``recomputing`` is False in the forward pass and True whenever backward
    runs the segment again, which is how buffers are updated exactly once.
    Raises ``RuntimeError`` in backward when a parameter it reads is another than in the forward pass, or was written
    since: autograd would notice only if it had kept that parameter.
    """
    if not torch.is_grad_enabled():
        return segment(module, False, *live_ins)
    if torch.compiler.is_compiling():  # AOTAutograd functionalizes buffer updates, so they happen once by themselves
        run = functools.partial(segment, module, False)
        return checkpoint(run, *live_ins, use_reentrant=False, preserve_rng_state=random)
    runs = itertools.count()
    parameters = _parameters(module, reads)
    versions = [_version(parameter) for parameter in parameters]

    def run_again(*tensors: Any) -> Any:
        recomputing = next(runs) > 0
        if recomputing:
            _refuse_changed(reads, parameters, versions, _parameters(module, reads))
        return segment(module, recomputing, *tensors)

    return checkpoint(run_again, *live_ins, use_reentrant=False, preserve_rng_state=random)


def _parameters(module: torch.nn.Module, names: tuple[str, ...]) -> list[Any]:
    """The parameters of these names, None for one that is no longer there (parametrized since, say)."""
    owners = vars(module).get(OWNERS, {})
    places = (owners.get(name) for name in names)
    return [None if place is None else place[0].get(place[1]) for place in places]


def _version(parameter: Tensor | None) -> int:
    """How often it was written in place, as autograd counts for what it keeps."""
    return 0 if parameter is None or parameter.is_inference() else parameter._version


def _refuse_changed(names: tuple[str, ...], before: list[Any], versions: list[int], now: list[Any]) -> None:
    for name, old, version, new in zip(names, before, versions, now, strict=True):
        if new is not old:
            raise RuntimeError(
                f"{name} was replaced between the forward and the backward pass, which computes with it."
            )
        if _version(new) != version:
            raise RuntimeError(
                f"{name} was written in place between the forward and the backward pass, which computes with it "
                f"(it is at version {_version(new)}; expected version {version})."
            )


def once(buffer: Tensor, recomputing: bool) -> Tensor:
    """The buffer an operator updates, or a scratch copy nobody reads when the operator runs again.

    Exact for every value, unlike running batch normalization again with momentum 0 (0 times infinity is not a number).
    """
    return torch.empty_like(buffer) if recomputing else buffer
