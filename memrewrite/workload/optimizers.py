"""Optimizers like another one, over other parameters."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from memrewrite.records.errors import UsageError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


SEVERAL = "several can be parts of one of your own, whose step takes theirs"
_NEEDED = ("state", "param_groups", "step", "zero_grad")


def one_of(made: Any) -> torch.optim.Optimizer:
    """What a factory made, ready to train, as those of schedulefree are not; raises ``UsageError`` for no optimizer."""
    if not all(hasattr(made, name) for name in _NEEDED):
        raise UsageError(f"optimizer makes a {type(made).__name__}, which is no torch.optim.Optimizer; {SEVERAL}.")
    if callable(train := getattr(made, "train", None)):
        train()
    return made


def parameters_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """All parameters of an optimizer's groups."""
    return [parameter for group in groups for parameter in group["params"]]


def hands_on(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    """Whether all that it steps, and all that it keeps, is that of another one."""
    return optimizer.param_groups is inner.param_groups and optimizer.state is inner.state


def optimizers_like(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None
) -> OptimizerFactory:
    """A factory of optimizers of that class, or ``kind``, with the settings of its first group; it is not touched.

    Of one that only hands on to another, as accelerate's does, it is that other one that is made again.
    Raises ``UsageError`` where the class takes more than its settings.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and hands_on(optimizer, inner):
        return optimizers_like(inner)
    kind = kind or type(optimizer)
    signature = inspect.signature(kind)
    settings = {**optimizer.defaults, **optimizer.param_groups[0]}
    known = {name: settings[name] for name in signature.parameters if name in settings and name != "params"}
    try:
        signature.bind([], **known)
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be made again from its settings ({error}); give a factory, "
            "lambda parameters: ..., as the optimizer."
        ) from error
    return functools.partial(kind, **known)
