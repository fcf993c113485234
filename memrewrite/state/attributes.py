"""What Python can change about a module besides its tensors' values: attributes, containers, plain objects, generators.

Forward may change them (a hazard: a graph would not), and front ends leave traces in them (to be taken back).
"""

import operator
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.runtime.differences import HOOKS, joined
from memrewrite.state.containers import contents, is_container, put_back
from memrewrite.state.random_state import preserved_everywhere

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONSTANTS = {bool, int, float, complex, str, bytes, type(None)}
LEVELS = 3
"""Of plain objects, one held by the other, that count as parts of a module which holds the first."""
OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial, Tensor, nn.Module)
_USUAL: tuple[Any, ...] = (object.__new__, SimpleNamespace.__new__)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The names of the attributes that every module has."""
_TABLES = ("_parameters", "_buffers", "_modules")  # where a module keeps what reads like an attribute


class Attributes:
    """The attributes of modules and their submodules as they were: the contents of each dict, list or set in reach.

    Plain objects held by a module count with their attributes, and those that they hold, ``LEVELS`` deep; so do
    containers of a class of their own. Generators of random numbers count with their state.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._kept: dict[int, tuple[str, Any, list[Any]]] = {}  # path, a container, its contents
        self._generators: dict[int, tuple[str, Any, Any]] = {}  # path, the generator, its state
        self._tensors: list[tuple[str, Tensor, int]] = []  # path, a tensor that is no parameter or buffer, its version
        trained = {id(p): (path, p, p.requires_grad) for module in modules for path, p in module.named_parameters()}
        self._trained = [*trained.values()]
        self._owned = {id(tensor) for module in modules for tensor in [*module.parameters(), *module.buffers()]}
        for module in modules:
            for path, child in module.named_modules():
                self._keep(path, vars(child), LEVELS)

    def _keep(self, path: str, container: Any, levels: int) -> None:
        if id(container) in self._kept:
            return
        parts = contents(container)
        self._kept[id(container)] = (path, container, parts)
        for key, item in _items(container, parts):
            if type(item) in _CONSTANTS:  # as most attributes of modules are, beside empty tables of hooks
                continue
            inner = path if key in _TABLES else joined(path, key)
            if type(item) in CONTAINERS and not item:
                self._kept.setdefault(id(item), (inner, item, []))
                continue
            if isinstance(item, Tensor) and id(item) not in self._owned:
                self._tensors.append((inner, item, _version(item)))
                continue
            if is_container(item):
                self._keep(inner, item, levels)
            if type(item) in CONTAINERS:
                continue
            if (state := drawn(item)) is not None:
                self._generators[id(item)] = (inner, item, state)
            elif levels and _has_attributes(item) and (levels == LEVELS or is_plain(item)):
                self._keep(inner, vars(item), levels - 1)

    def changed(self) -> Iterator[tuple[str, Any]]:
        """Path and new value of each attribute or item that is no longer what it was."""
        for path, container, kept in self._kept.values():
            parts = contents(container)
            if len(parts) == len(kept) and all(map(operator.is_, parts, kept)):
                continue
            now, before = dict(_items(container, parts)), dict(_items(container, kept))
            for key in dict.fromkeys([*before, *now]):
                if key not in now or key not in before or not _same(before[key], now[key]):
                    yield (path if key in _TABLES else joined(path, key)), now.get(key)
        for path, generator, state in self._generators.values():
            if _all_of(drawn(generator)) != _all_of(state):
                yield path, generator
        for path, parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                yield f"{path}.requires_grad", parameter.requires_grad

    def written(self) -> Iterator[str]:
        """Path of each tensor in a plain attribute or container that was written in place."""
        return (path for path, tensor, version in self._tensors if _version(tensor) != version)

    def restore(self) -> None:
        """Put every container back, in place, into the same objects."""
        for _, container, kept in self._kept.values():
            put_back(container, kept)
        for _, generator, state in self._generators.values():
            set_drawn(generator, state)
        for _, parameter, trained in self._trained:
            parameter.requires_grad_(trained)


def _version(tensor: Tensor) -> int:
    """How often it was written in place; that of what was made under ``torch.inference_mode`` is not counted."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Put attributes and random state back afterwards; meanwhile the module's own hooks are off, and its compiled form.

    Whoever calls a drop-in calls those hooks around its forward; a front end would trace them into the graph.
    """
    attributes = Attributes(module)
    for name in HOOKS:
        vars(module)[name] = OrderedDict()
    vars(module)["_compiled_call_impl"] = None
    try:
        with preserved_everywhere():
            yield
    finally:
        attributes.restore()


def _items(container: Any, parts: list[Any]) -> list[tuple[Any, Any]]:
    """The contents of a container as keys and values: a list has its positions for keys, a set None for values."""
    if isinstance(container, dict):
        return list(zip(parts[::2], parts[1::2], strict=True))
    if isinstance(container, set):
        return [(item, None) for item in parts]
    return list(enumerate(parts))


def _same(old: Any, new: Any) -> bool:
    """The same object, or plain values and containers of such that are equal."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple) or type(old) in CONTAINERS:
        pairs, others = ([*enumerate(v)] if isinstance(v, tuple) else _items(v, contents(v)) for v in (old, new))
        return len(pairs) == len(others) and all(
            k == key and _same(v, value) for (k, v), (key, value) in zip(pairs, others, strict=True)
        )
    return isinstance(old, _PLAIN) and (old == new or old != old)


def is_usual(kind: type) -> bool:
    """Whether objects of a class are made as objects usually are, and end nothing when they are gone."""
    return kind.__new__ in _USUAL and not hasattr(kind, "__del__")


def is_plain(value: Any) -> bool:
    """Whether this is an object of a class of the user's that consists of its attributes by name."""
    kind = type(value)
    return _has_attributes(value) and is_usual(kind) and not any("__slots__" in vars(each) for each in kind.__mro__)


def slots_of(kind: type) -> list[str]:
    """The names of the attributes that a class itself has slots for."""
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def bare(kind: type) -> Any:
    """An object of a class without any attribute, whatever the class does when one is made."""
    return (SimpleNamespace if issubclass(kind, SimpleNamespace) else object).__new__(kind)


def _has_attributes(item: Any) -> bool:
    return hasattr(item, "__dict__") and not isinstance(item, OPAQUE) and not of_torch(item)


def of_torch(item: Any) -> bool:
    """Whether the class of an object is PyTorch's or Python's own."""
    return type(item).__module__.partition(".")[0] in ("torch", "builtins")


def drawn(item: Any) -> Any:
    """The state of a random generator of Python, NumPy or PyTorch, None for everything else."""
    if isinstance(item, random.Random):
        return item.getstate()
    if isinstance(item, torch.Generator):
        return item.get_state()
    bits = getattr(item, "bit_generator", None) if str(type(item).__module__).startswith("numpy.") else None
    return None if bits is None else bits.state


def set_drawn(generator: Any, state: Any) -> None:
    """Give a generator the state that ``drawn`` found."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _all_of(state: Any) -> str:
    return str(state.tolist() if isinstance(state, Tensor) else state)
