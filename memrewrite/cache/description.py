"""What values are, as one digest that is the same in every process that has the same: a model, its code, its settings.

    Net(width=8)     its class, the code of all its methods and of the functions and values that code names, attributes,
                     submodules in order, types, shapes, strides and devices of tensors, what is one object twice

Values of parameters and buffers do not count, which a program looks up when it runs. The user's code is followed
wherever it leads, as it runs, so that a function that was replaced is another one. Of an installed package its files
tell, and besides, of what forward may call by its name, which functions are there now. Of PyTorch and the standard
library the version tells, and what was replaced in them is looked at. Whatever has no description raises
``IndescribableError``: nothing is guessed.
"""

import enum
import functools
import hashlib
import logging
import os
import pathlib
import re
import threading
import types
import weakref
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memrewrite.cache import code
from memrewrite.cache.libraries import is_foreign, library_of, module_of, stamp
from memrewrite.runtime.code_inside import names_inside
from memrewrite.runtime.guards import TABLES
from memrewrite.state.attributes import OF_EVERY_MODULE, slots_of
from memrewrite.state.bits import fingerprint
from memrewrite.state.containers import contents, in_closure, is_container
from memrewrite.torch_internals.operators import OpOverload, OpOverloadPacket

_MOST = 200_000  # objects, some seconds: a model that leads to a data set, say, is not worth describing
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_BASES: tuple[Any, ...] = (int, float, complex, str, bytes)  # of classes of their own
_PRINTED: tuple[Any, ...] = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, pathlib.PurePath, range, slice, re.Pattern),
    *(np.generic, np.dtype, types.UnionType, types.GenericAlias, TypeVar),
)
# What has a state of its own that no graph depends on: how to tell others, to wait for them, to draw numbers.
_BY_TYPE: tuple[Any, ...] = (
    *(logging.Logger, threading.local, ContextVar, type(os.environ), type(threading.Lock()), type(threading.RLock())),
    *(weakref.ref, torch.Generator, np.random.Generator, np.random.BitGenerator),
    type(vars(namedtuple("_", "field"))["field"]),
)
_IN_C: tuple[Any, ...] = (
    *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.partialmethod)
# What Python and PyTorch call of a class.
_CALLED = (
    *("forward", "backward", "setup_context", "jvp", "vmap", "__torch_function__", "__torch_dispatch__"),
    *("__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__", "__contains__"),
)
_OF_ONE_MODULE = frozenset({*TABLES, "training", "_non_persistent_buffers_set"})
# What somebody gave a kernel of Triton's, its autotuner, one of its configurations, its heuristics, a constant, a type.
_OF_KERNELS = (
    *("pre_run_hooks", "configs", "keys", "reset_to_zero", "restore_value", "early_config_prune", "perf_model"),
    *("configs_top_k", "kwargs", "num_warps", "num_ctas", "num_stages", "maxnreg", "ir_override"),
    *("pre_hook", "post_hook", "values", "value", "name"),
)
_HASH = re.compile("hash")  # of text, say, which is another number in every process
_OPERATORS = (OpOverload, OpOverloadPacket)


class IndescribableError(Exception):
    """A value has no description that is the same in every process."""


class Description:
    """The values that were added, each object once, in the order they were met."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # so that no two of them have one id
        self._waiting: deque[Any] = deque()
        self._by_form: set[int] = set()
        self._storages: dict[int, int] = {}
        self._values = True
        self._called = set(_CALLED)  # names by which code that was described may find a method
        self._uncalled: dict[str, list[Any]] = defaultdict(list)  # methods of libraries by names that none has yet

    def add(self, name: str, value: Any, *, values: bool = True) -> None:
        """Describe a value and all it leads to; where ``values`` is False, tensors by their form alone.

        Raises ``IndescribableError``.
        """
        self._values = values
        self._write(name)
        self._write(self._text(value))
        while self._waiting:
            value = self._waiting.popleft()
            for part in _describer(value)(self, value):
                self._write(part)
            self._write("")

    def digest(self) -> str:
        """64 hexadecimal digits."""
        return self._digest.hexdigest()

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor is that of one that was met."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def _write(self, part: str) -> None:
        self._digest.update(part.encode(errors="surrogatepass") + b"\0")

    def _text(self, value: Any) -> str:
        """The value itself where it is short and has no identity, else its number."""
        if type(value) in _SIMPLE:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, enum.Enum):
            return f"{_name(type(value))} {value.name}"
        if isinstance(value, _BASES):
            base = next(kind for kind in _BASES if isinstance(value, kind))
            return f"{_name(type(value))} {base.__repr__(value)}"
        if isinstance(value, _PRINTED):
            return f"{_name(type(value))} {value!r}"
        if isinstance(value, tuple):
            kind = "" if type(value) is tuple else self._text(type(value))
            return f"{kind}({', '.join(map(self._text, value))})"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(map(self._text, sorted(value, key=_order)))}}}"
        if id(value) not in self._numbers:
            if len(self._held) >= _MOST:
                raise IndescribableError(f"it leads to more than {_MOST} objects")
            self._numbers[id(value)] = len(self._held)
            self._held.append(value)
            self._waiting.append(value)
        return f"#{self._numbers[id(value)]}"

    def _texts(self, *values: Any) -> Iterator[str]:
        return map(self._text, values)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> Iterator[str]:
        for key, value in pairs:
            yield self._text(key)
            yield self._text(value)

    def module(self, module: nn.Module) -> Iterator[str]:
        """Its class, tables, attributes and hooks; the latter without their keys, which count them in this process."""
        attributes = vars(module)
        for table in ("_parameters", "_buffers"):
            self._by_form |= {id(tensor) for tensor in attributes[table].values()}
        yield self._text(type(module))
        for name, value in sorted(attributes.items(), key=_first):
            if name in _OF_ONE_MODULE or name not in OF_EVERY_MODULE:
                yield name
                yield from self._pairs(value.items()) if name in TABLES else self._texts(value)
            elif isinstance(value, dict):
                yield name
                yield from self._texts(*value.values())

    def tensor(self, tensor: Tensor) -> Iterator[str]:
        """Its form, which others share its memory, what is attached to it, and where that counts its value."""
        yield f"{_name(type(tensor))} {tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.layout}"
        yield f"{tensor.requires_grad} {tensor.is_leaf} {tensor.is_leaf and tensor.grad is not None}"
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            place = tensor.untyped_storage().data_ptr()
            storage = self._storages.setdefault(place, len(self._storages)) if place else -1
            yield f"{tensor.stride()} {tensor.storage_offset()} {storage}"
        yield from self._pairs(sorted(vars(tensor).items()))
        yield from self._texts(*(tensor._backward_hooks or {}).values())
        if self._values and id(tensor) not in self._by_form:
            yield _bits(tensor)

    def function(self, function: types.FunctionType) -> Iterator[str]:
        """Its code, defaults, what is bound to it and what its code names; of PyTorch's, its name."""
        yield _name(function)
        if not is_foreign(function):
            return
        library = library_of(function)
        yield stamp(library) if library else ""
        yield from code.texts(function.__code__)
        constants, names = [*code.constants(function.__code__)], {*names_inside(function.__code__)}
        yield from self._texts(*constants)
        if {"environ", "getenv"} & names:
            words = {each for each in constants if isinstance(each, str)}
            yield from self._pairs((name, os.environ[name]) for name in sorted(words & os.environ.keys()))
        for name in sorted(names - self._called):
            self._called.add(name)
            yield from self._pairs((name, value) for value in self._uncalled.pop(name, ()))
        known = self._known_to(library)
        yield from map(known, in_closure(function).values())
        yield from map(known, [function.__defaults__, *(function.__kwdefaults__ or {}).items()])
        yield from (each for name, value in sorted(vars(function).items()) for each in (name, known(value)))
        for name, value in _named(function):
            yield name
            yield known(value)

    def _known_to(self, library: str) -> Callable[[Any], str]:
        """What describes a value that code names: fully, but where that is an installed package's own business."""

        def text(value: Any) -> str:
            others = library_of(value) if isinstance(value, type | types.FunctionType) else ""
            if others not in ("", library):
                return f"{_name(value)} {stamp(others)}"
            mine = type(value) in _SIMPLE or isinstance(value, (type, *_METHODS, types.MethodType, functools.partial))
            return self._text(value) if mine else _name(type(value))

        return text if library else self._text

    def kind(self, kind: type) -> Iterator[str]:
        """A class: all it has if it is the user's own, of a library what code calls, of PyTorch what was replaced."""
        yield _name(kind)
        if not is_foreign(kind):
            replaced = ((name, value) for name, value in sorted(vars(kind).items()) if _is_code(value))
            yield from self._pairs(replaced)
            return
        library = library_of(kind)
        yield stamp(library) if library else ""
        yield from self._texts(type(kind), *kind.__bases__)
        for name, value in sorted(vars(kind).items()):
            special = name.startswith("__") and name not in _CALLED
            if name == "_abc_impl" or (special and (library or not isinstance(value, _METHODS))):
                continue
            if library and isinstance(value, _METHODS) and name not in self._called:
                self._uncalled[name].append(value)
                continue
            yield name
            yield self._known_to(library)(value)

    def container(self, container: Any) -> Iterator[str]:
        """What is in it, and its attributes if its class gives it any."""
        yield self._text(type(container))
        yield from self._texts(*contents(container))
        yield from self._pairs(sorted(getattr(container, "__dict__", {}).items()))

    def in_c(self, function: Any) -> Iterator[str]:
        """A function or descriptor without code that can be seen."""
        owner = getattr(function, "__self__", None)
        yield _name(function)
        yield owner.__name__ if isinstance(owner, types.ModuleType) else self._text(owner)
        if getattr(function, "__module__", None) and is_foreign(function):
            yield stamp(module_of(function).partition(".")[0])

    def instance(self, value: Any) -> Iterator[str]:
        """Any other object: its class and attributes."""
        kind = type(value)
        slots = {name for base in kind.__mro__ for name in slots_of(base) if hasattr(value, name)}
        if kind is not object and not slots and not hasattr(value, "__dict__") and not _is_known_by_name(value):
            raise IndescribableError(f"there is a {_name(kind)}")
        yield self._text(kind)
        library = library_of(kind)
        for name, each in sorted(getattr(value, "__dict__", {}).items(), key=_first):
            if not (library and _HASH.search(str(name))):
                yield from self._pairs([(name, each)])
        yield from self._pairs((name, getattr(value, name)) for name in sorted(slots))

    def kernel(self, kernel: Any) -> Iterator[str]:
        """A kernel of Triton's, what tunes it, a value for one: all other attributes are of this process."""
        yield from self._texts(type(kernel), getattr(kernel, "fn", None))
        yield from self._pairs((name, getattr(kernel, name)) for name in _OF_KERNELS if hasattr(kernel, name))


def _is_known_by_name(value: Any) -> bool:
    """Whether it is the only one of its class, such as ``typing.NoDefault``, which pickle knows by a name alone.

    Its class says so: what every object has instead makes another one, which ends the process for some of PyTorch's.
    """
    if vars(type(value)).get("__reduce__") is None:
        return False
    try:
        return isinstance(value.__reduce__(), str)
    except TypeError:  # what cannot be pickled
        return False


Describer = Callable[[Description, Any], Iterator[str]]
_KINDS: tuple[tuple[Any, Describer], ...] = (
    (nn.Module, Description.module),
    (Tensor, Description.tensor),
    (types.FunctionType, Description.function),
    (types.MethodType, lambda it, value: it._texts(value.__func__, value.__self__)),
    ((functools.partial, functools.partialmethod), lambda it, value: it._texts(value.func, value.args, value.keywords)),
    ((staticmethod, classmethod), lambda it, value: it._texts(type(value), value.__func__)),
    (property, lambda it, value: it._texts(value.fget, value.fset, value.fdel)),
    (type, Description.kind),
    (types.MappingProxyType, lambda it, value: it._pairs(value.items())),
    (types.ModuleType, lambda it, value: iter([value.__name__])),
    (_OPERATORS, lambda it, value: iter([str(value)])),
    (torch.library.Library, lambda it, value: it._texts(value.ns, value.kind, value.dispatch_key)),
    (np.ndarray, lambda it, value: iter([f"{value.dtype} {value.shape}", value.tobytes().hex()])),
    (_IN_C, Description.in_c),
    (_BY_TYPE, lambda it, value: iter([_name(type(value))])),
)


def replaced_in_torch() -> dict[str, Any]:
    """The functions that were put in the place of PyTorch's own, wherever models look for those."""
    places = (torch, torch.nn.functional, torch.Tensor, torch.nn.init)
    return {f"{_name(p)}.{name}": value for p in places for name, value in vars(p).items() if _is_code(value)}


def _describer(value: Any) -> Describer:
    if is_container(value):
        return Description.container
    if type(value).__module__.partition(".")[0] == "triton":
        return Description.kernel
    return next((found for kind, found in _KINDS if isinstance(value, kind)), Description.instance)


def _named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What the code of a function finds in its module, and in modules that it names or imports, by its name there."""
    attributes, seen = {*names_inside(function.__code__)}, set[int]()

    def found(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif id(value) not in seen:
            seen.add(id(value))
            yield name, value
            foreign = is_foreign(value)  # of others, what was replaced
            for inner in sorted(attributes & vars(value).keys()):
                each = vars(value)[inner]
                of_torch = isinstance(each, types.ModuleType) and module_of(value).startswith("torch")
                if foreign or of_torch or _is_code(each):
                    yield from found(f"{name}.{inner}", each)

    space = function.__globals__
    imported = code.imported_modules(function.__code__, str(space.get("__package__") or ""))
    for name in code.global_names(function.__code__):
        if name in space:
            yield from found(name, space[name])
    for name, module in imported:
        yield from found(name, module)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"


def _first(pair: tuple[Any, Any]) -> str:
    return str(pair[0])


def _is_code(value: Any) -> bool:
    """Whether this is foreign code, such as what replaced a function of PyTorch's."""
    return isinstance(value, types.FunctionType | type) and is_foreign(value)


def _order(value: Any) -> str:
    """What the items of a set are sorted by."""
    if type(value) in _SIMPLE or isinstance(value, torch.dtype):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))} {value.name}"
    if isinstance(value, type | types.FunctionType):
        return _name(value)
    if type(value) is tuple:
        return " ".join(map(_order, value))
    raise IndescribableError(f"there is a set that holds a {_name(type(value))}")


def _bits(tensor: Tensor) -> str:
    if tensor.device.type == "meta":
        return ""
    try:
        return fingerprint(tensor.detach().resolve_conj().resolve_neg()).hex()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise IndescribableError(f"there is a {_name(type(tensor))} of {tensor.layout}") from error
