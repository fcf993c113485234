"""Whether tensors and what holds them are as they were: modules, containers and plain objects, each by identity."""

import operator
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memrewrite.state import containers
from memrewrite.torch_internals.autograd_nodes import has_hooks
from memrewrite.torch_internals.spread import is_spread

_PLAIN = {dict, OrderedDict}


class Unchanged:
    """What was true of some values when they were added, as far as a copy of them depends on it.

    Of a tensor its form, its place in its storage and its attributes, but not what it holds; of a container what is in
    it, of other objects their attributes. Tensors without a storage of their own are never taken for unchanged.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._forms: list[Any] = []
        self._empty: list[Any] = []  # plain dictionaries, as most tables of a module's hooks are
        self._tables: list[dict[str, Any]] = []  # attributes, and dictionaries by name
        self._rows: list[tuple[list[str], list[Any]]] = []
        self._others: list[tuple[Any, list[Any]]] = []

    def add(self, values: Iterable[Any]) -> None:
        """Take these, too, as they are now."""
        for value in values:
            if isinstance(value, Tensor):
                self._tensors.append(value)
                self._forms.append(_form(value))
            elif type(value) in _PLAIN:
                self._add_table(value)
                continue
            elif containers.is_container(value):
                self._others.append((value, containers.contents(value)))
            if hasattr(value, "__dict__"):
                self._add_table(vars(value))

    def _add_table(self, table: dict[Any, Any]) -> None:
        if not table:
            self._empty.append(table)
        elif all(type(key) is str for key in table):
            self._tables.append(table)
            self._rows.append((list(table), list(table.values())))
        else:
            self._others.append((table, containers.contents(table)))

    def holds(self) -> bool:
        """Whether all of that is still true."""
        if any(self._empty) or not all(map(_is_as, self._tables, self._rows)):
            return False
        if not all(_are(containers.contents(container), then) for container, then in self._others):
            return False
        return None not in self._forms and list(map(_form, self._tensors)) == self._forms


def _is_as(table: dict[str, Any], row: tuple[list[str], list[Any]]) -> bool:
    names, values = row
    return list(table) == names and all(map(operator.is_, table.values(), values))


def _are(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _form(tensor: Tensor) -> tuple[Any, ...] | None:
    """What a tensor is without its values; None where it has no storage of its own."""
    if tensor.layout is not torch.strided or is_spread(type(tensor)):
        return None
    storage = tensor.untyped_storage()
    place = StorageWeakRef(storage), storage.nbytes(), tensor.storage_offset()
    marks = tensor.requires_grad, tensor.is_leaf, tensor.is_neg(), tensor.is_conj(), has_hooks(tensor)
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), place, marks
