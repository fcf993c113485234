"""Copies of modules over other tensors, and the tensors that such a copy would replace."""

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn

from memrewrite.runtime.dropin import empty_like, own, prepare
from memrewrite.state import containers
from memrewrite.state.attributes import LEVELS, OPAQUE, bare, is_plain


def tensors_of(*modules: nn.Module) -> list[Tensor]:
    """Every tensor that ``fake_twin`` would replace, each once: parameters, buffers, tensors in plain attributes."""
    finder = Finder()
    for module in modules:
        finder.copy(module)
    return finder.found


_PLAIN_DICTS = {dict, OrderedDict}  # of which a module has a dozen; their own way to copy them is the faster one
_SHARED = (str, int, float, bool, type, type(None))
_EMPTY = object()
_CONSTANTS = {str, int, float, bool, type(None)}  # known by their type, as most attributes of a module are


class Copier:
    """Copies modules, plain containers and the objects that modules hold, converts tensors, shares everything else.

    So are objects that these hold, ``LEVELS`` deep, and what has tensors or modules; the rest is shared, as it may lead
    to all there is.
    Not ``copy.deepcopy``: modules hold locks, generators and other objects that it cannot copy, and may define their
    own ``__deepcopy__`` or ``__reduce__``.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []  # keeps the ids in the memo from being used again
        self._copies: list[Any] = []
        self._levels = 0  # of objects that are copied whatever they hold, as a module is near
        self.knows_all = True  # whether all that it copied is in these

    def made(self, start: int) -> tuple[list[Any], list[Any]]:
        """What was copied, and the copies, from the one numbered ``start`` on."""
        return self._originals[start:], self._copies[start:]

    def copy(self, value: Any) -> Any:
        """The copy of ``value``; the same object for the same object."""
        if isinstance(value, _SHARED):
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._within(value, LEVELS)
        if containers.is_container(value):
            return self._container(value)
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            changed = any(new is not old for new, old in zip(items, value, strict=True))
            return self._remember(value, tuple.__new__(type(value), items) if changed else value)
        if (is_dataclass(value) and hasattr(value, "__dict__")) or _leads_on(value, self._levels > 0):
            return self._within(value, max(self._levels - 1, 0))
        return self._reference(value)

    def _within(self, value: Any, levels: int) -> Any:
        before, self._levels = self._levels, levels
        copied = self._object(value)
        self._levels = before
        return copied

    def _tensor(self, value: Tensor) -> Tensor:
        """A parameter keeps what libraries put on it, such as the scales of 4-bit weights."""
        copied: Tensor = self._remember(value, self._convert(value))
        for name, item in vars(value).items() if isinstance(value, nn.Parameter) else ():
            held = _holds_tensors(item) and id(item) not in self._memo
            vars(copied).setdefault(name, self._object(item) if held else self.copy(item))
        return copied

    def _object(self, value: Any) -> Any:
        kept = own(value) if isinstance(value, nn.Module) else None
        copied = self._remember(value, bare(type(value)) if kept is None else empty_like(value))
        self.knows_all &= kept is None  # a drop-in has more to itself
        # Past any __setattr__: the attributes are those of a finished object.
        vars(copied).update({name: self._attribute(item) for name, item in vars(value).items()})
        if kept is not None:
            prepare(copied, {name: self.copy(tensor) for name, tensor in kept.constants.items()})
        return copied

    def _attribute(self, item: Any) -> Any:
        """``copy``, shorter for what most attributes of modules are: constants and empty tables of hooks."""
        if type(item) in _CONSTANTS:
            return item
        empty = type(item) in _PLAIN_DICTS and not item and id(item) not in self._memo
        return self._remember(item, item.copy()) if empty else self.copy(item)

    def _container(self, value: Any) -> Any:
        if type(value) in _PLAIN_DICTS:
            copied = self._remember(value, value.copy())
            if not value:
                return copied
            if all(type(key) is str for key in value):
                for key, part in value.items():
                    new = self.copy(part)
                    if new is not part:
                        copied[key] = new
                return copied
        else:
            copied = self._remember(value, containers.copied(value))
        parts = containers.contents(value)
        changed = [part if type(part) in _CONSTANTS else self.copy(part) for part in parts]
        if any(one is not other for one, other in zip(changed, parts, strict=True)):
            containers.put(copied, changed)
        return copied

    def _reference(self, value: Any) -> Any:
        """Closures, bound methods, partials and weak references lead to the copy of what they lead to."""
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._closure(value, value.__closure__)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords))
        if isinstance(value, weakref.ref) and isinstance(target := value(), Tensor | nn.Module):
            return weakref.ref(self.copy(target))
        return value

    def _closure(self, value: types.FunctionType, cells: tuple[types.CellType, ...]) -> Any:
        """The function itself where its variables lead to nothing that is copied."""
        new = tuple(self._memo.get(id(cell)) or self._remember(cell, types.CellType()) for cell in cells)
        copied = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, new)
        copied.__kwdefaults__ = value.__kwdefaults__
        self._remember(value, copied)
        for old, cell in zip(cells, new, strict=True):
            if _content(cell) is _EMPTY and _content(old) is not _EMPTY:
                cell.cell_contents = self.copy(old.cell_contents)
        if all(_content(old) is _content(cell) for old, cell in zip(cells, new, strict=True)):
            self._memo[id(value)] = value
            return value
        self.knows_all = False  # of what a variable holds, it is not seen when it changes
        vars(copied).update({name: self.copy(item) for name, item in vars(value).items()})
        return copied

    def _remember(self, value: Any, copied: Any) -> Any:
        self._memo[id(value)] = copied
        self._originals.append(value)
        self._copies.append(copied)
        return copied


def _holds_tensors(value: Any) -> bool:
    """Whether this is a plain object with tensors as attributes."""
    plain = hasattr(value, "__dict__") and not isinstance(value, (*OPAQUE, dict))
    return plain and any(isinstance(each, Tensor) for each in vars(value).values())


def _leads_on(value: Any, near: bool) -> bool:
    """Whether this is a plain object of the user's with attributes, modules or tensors if not ``near``."""
    if not is_plain(value):
        return False
    attributes = vars(value).values()
    return (near and len(attributes) > 0) or any(isinstance(each, Tensor | nn.Module) for each in attributes)


def _content(cell: types.CellType) -> Any:
    """What a variable of a closure holds, ``_EMPTY`` where it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


class Finder(Copier):
    """Goes where a copier goes and copies nothing: ``found`` are the tensors it meets, each once."""

    def __init__(self) -> None:
        found: list[Tensor] = []  # not self: a cycle would keep the tensors alive until it is collected

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        super().__init__(keep)
        self.found = found

    def _object(self, value: Any) -> Any:
        self._remember(value, value)
        for item in vars(value).values():  # most attributes of modules are constants and empty tables of hooks
            if type(item) not in _CONSTANTS and not (type(item) in _PLAIN_DICTS and not item):
                self.copy(item)
        kept = own(value) if isinstance(value, nn.Module) else None
        for tensor in kept.constants.values() if kept is not None else ():
            self.copy(tensor)
        return value

    def _container(self, value: Any) -> Any:
        self._remember(value, value)
        for part in containers.contents(value):
            if type(part) not in _CONSTANTS:
                self.copy(part)
        return value

    def _closure(self, value: types.FunctionType, cells: tuple[types.CellType, ...]) -> Any:
        self._remember(value, value)
        for cell in cells:
            self.copy(_content(cell))
        return value
