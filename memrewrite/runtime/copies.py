"""Copies of drop-ins whose class has a ``__deepcopy__`` of PyTorch's. Torch only; part of every artifact."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

Reduce = Callable[[Any, Any], tuple[Any, tuple[Any, ...], tuple[Any, ...]]]


def is_of_parametrized(base: type[nn.Module]) -> bool:
    """Whether PyTorch made a class for one parametrized module; its copies stay of that class, and of ours alone."""
    return getattr(getattr(base, "__deepcopy__", None), "__module__", "") == parametrize.__name__


def copied_by(reduce: Reduce) -> Callable[[nn.Module, dict[int, Any]], nn.Module]:
    """A ``__deepcopy__`` that makes what ``reduce`` says of a drop-in and of its attributes."""

    def copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        load, given, state = reduce(self, vars(self))
        memo[id(self)] = result = load(*given)
        result.__setstate__(copy.deepcopy(state, memo))
        return result

    return copied
