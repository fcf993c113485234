"""An optimizer's step that takes some parameters at a time, and so makes that much less beside them.

By default PyTorch's optimizers on CUDA update all parameters of a group at once (``foreach``), with temporaries as
large as they are. In groups of fewer bytes, one after the other, the same kernels compute the same bits of each.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.workload.narrowed import Narrowed, O, check, narrowed, parts
from memrewrite.workload.optimizers import OptimizerFactory, optimizers_like, parameters_in

MOST = 64 * 2**20
"""Bytes of the parameters in a group: what AdamW makes beside them is as much."""


class InGroups(Narrowed):
    """What an optimizer's class has before its own where it steps in groups."""

    def _around(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        groups = [part for group in self.param_groups for part in parts(group, _divided(group["params"], self._size))]
        with self._with(groups):
            return step(*args, **kwargs)


def step_in_groups(optimizer: O, most: int = MOST) -> O:
    """Let each step of ``optimizer`` take its parameters in groups of at most ``most`` bytes; returns the optimizer.

    Its state, its groups as everybody else sees them, and ``state_dict`` stay as they are. A parameter of more bytes is
    a group by itself. Raises ``UsageError`` where that step would not have the same bits: where what it does to one
    parameter depends on others, or it takes no groups.
    """
    if isinstance(optimizer, Narrowed):
        return optimizer
    check_groups(optimizers_like(optimizer), parameters_in(optimizer.param_groups))
    return narrowed(optimizer, InGroups, most)


def making_groups(factory: OptimizerFactory, most: int = MOST) -> OptimizerFactory:
    """A factory of the same optimizers that step in groups; nothing is tried."""
    return functools.partial(_made, factory, most)


def made_whole(factory: OptimizerFactory | None) -> tuple[OptimizerFactory | None, int | None]:
    """The factory of the same optimizers without groups, and the bytes of a group, None where it makes none."""
    if isinstance(factory, functools.partial) and factory.func is _made:
        return factory.args[0], factory.args[1]
    return factory, None


def check_groups(make: OptimizerFactory, parameters: list[nn.Parameter]) -> None:
    """Raise ``UsageError`` where steps in groups of one parameter, of small ones like these, have other bits."""
    check(make, parameters, InGroups, "in groups")


def _made(factory: OptimizerFactory, most: int, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return narrowed(factory(parameters), InGroups, most)


def _divided(parameters: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Them in lists of so many bytes."""
    found: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        if not found or parameter.nbytes > room:
            found.append([])
            room = most
        found[-1].append(parameter)
        room -= parameter.nbytes
    return iter(found)
