"""Copies of the objects that a model is given beside tensors, such as a cache of keys and values that it writes."""

import copy
import random
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from memrewrite.state import containers
from memrewrite.state.attributes import OPAQUE, bare, is_usual, of_torch


class Copies:
    """Copies objects with all that they hold, whatever they say of being copied; what is one object stays one.

    Tensors are what ``convert`` makes of them, but for ``shared`` ones. Modules and functions are shared, too, and,
    with what they hold, objects that are not made of attributes alone or that end something when they are gone.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor], shared: Iterable[Tensor] = ()) -> None:
        self._convert = convert
        self._made: dict[int, Any] = {id(tensor): tensor for tensor in shared}

    def of(self, value: Any) -> Any:
        """The copy of ``value``, which has to live as long as this."""
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, Tensor):
            return self._keep(value, self._convert(value))
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if containers.is_container(value):
            copied = self._keep(value, containers.copied(value))
            containers.put(copied, [self.of(part) for part in containers.contents(value)])
            return self._with_attributes(copied, value) if hasattr(value, "__dict__") else copied
        if isinstance(value, tuple):
            return self._keep(value, tuple.__new__(type(value), map(self.of, value)))
        if isinstance(value, torch.Generator):
            return self._keep(value, value.clone_state())
        if isinstance(value, random.Random) or type(value).__module__.partition(".")[0] == "numpy":
            return self._keep(value, copy.deepcopy(value))
        if not _is_made_of_attributes(value):
            return value
        return self._with_attributes(self._keep(value, bare(type(value))), value)

    def _with_attributes(self, copied: Any, value: Any) -> Any:
        """Past any ``__setattr__``, as the attributes are those of a finished object."""
        state = object.__getstate__(value)
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        for name, item in (attributes or {}).items():
            vars(copied)[name] = self.of(item)
        for name, item in (slots or {}).items():
            object.__setattr__(copied, name, self.of(item))
        return copied

    def _keep(self, value: Any, copied: Any) -> Any:
        self._made[id(value)] = copied
        return copied


def alone(tensor: Tensor) -> Tensor:
    """The same numbers to be written apart, or the tensor itself where it gathers a gradient: that is the caller's."""
    if tensor.is_leaf and tensor.requires_grad:
        return tensor
    with torch.no_grad():
        return tensor.clone()


def _is_made_of_attributes(value: Any) -> bool:
    kind: Any = type(value)
    if isinstance(value, OPAQUE) or of_torch(value):
        return False
    has_some = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    return has_some and is_usual(kind)
