"""What the code of a model and of a loss function can write to besides the model, put back after it ran here.

A loss is kept in a list, a tracker of a run counts steps, a hook or forward leaves a tensor where others look at it.
All of that runs many times here, without data too, and what reads it afterwards is to find what it was. Only what got
a tensor or a number is put back: the rest is of nobody's step.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from memrewrite.records.lines import is_users
from memrewrite.runtime.differences import joined
from memrewrite.runtime.guards import hooks_of
from memrewrite.state.attributes import OF_EVERY_MODULE, drawn, set_drawn, slots_of
from memrewrite.state.containers import contents, in_closure, is_container, put_back
from memrewrite.workload.held import in_reach, names_in, user_functions

_DEEPEST = 4  # containers, objects and functions inside one another, as in ``held``
_MANY = 10_000  # a container of more is kept, and what it contains is not looked into
_GONE = object()
_PLAIN = (str, int, float, bool, type(None), bytes)
# Objects of classes of these are left alone, but for a namespace.
_NOT_THEIRS = {"torch", "memrewrite", "builtins", *sys.stdlib_module_names} - {"types", "__main__"}


@dataclass(frozen=True)
class _Names:
    """What some names stood for: globals that are assigned, a variable of a closure, attributes of a class."""

    path: str
    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], None]
    kept: dict[str, Any]

    def put_back(self) -> None:
        """Let them stand for that again."""
        now = self.read()
        for name in dict.fromkeys([*now, *self.kept]):
            if now.get(name, _GONE) is not (before := self.kept.get(name, _GONE)):
                self.write(name, before)


class Surroundings:
    """Containers, objects, globals and variables in reach of the code of some models and functions, as they were."""

    def __init__(self, models: Iterable[nn.Module], *functions: Callable[..., Any] | None) -> None:
        self._containers: dict[int, tuple[str, Any, list[Any]]] = {}
        self._names: list[tuple[Any, _Names]] = []  # with whose they are
        self._generators: list[tuple[Any, Any]] = []  # of random numbers, with their state
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # keeps these ids from being used again
        for model in models:
            for module in model.modules():
                self._look_into(_own(module), "self", 1)
                self._look_into(dict(enumerate(hooks_of(module))), "hooks", 0)
            for kind in {type(module): None for module in model.modules()}:
                self._class(kind)
            for function in user_functions(model):
                self._look("", function, 0)
        for each in filter(None, functions):
            self._look("", each, 0)

    def got(self) -> Iterator[str]:
        """The names by which new tensors that came to be there can be found."""
        for path, container, kept in self._containers.values():
            yield from (path for part in _new(contents(container), kept) if _has_tensors(part))
        for _, names in self._names:
            others = ((name, part) for name, part in names.read().items() if part is not names.kept.get(name))
            yield from (joined(names.path, name) for name, part in others if _has_tensors(part))

    def counted(self) -> Iterator[str]:
        """The names by which numbers that are others now, or new, can be found."""
        for path, container, kept in self._containers.values():
            pairs = zip_longest(contents(container), kept, fillvalue=_GONE)
            yield from (path for now, before in pairs if _is_number(now) and now != before)
        for _, names in self._names:
            numbers = {name: part for name, part in names.read().items() if _is_number(part)}
            yield from (joined(names.path, n) for n, part in numbers.items() if part != names.kept.get(n, _GONE))

    def restore(self) -> None:
        """Put back, in place, what got a tensor or a number, and what numbers were drawn from."""
        for _, container, kept in self._containers.values():
            if any(map(_is_result, _others(contents(container), kept))):
                put_back(container, kept)
        for _, names in self._names:
            if any(map(_is_result, _others([*names.read().values()], [*names.kept.values()]))):
                names.put_back()
        for generator, state in self._generators:
            set_drawn(generator, state)

    def _look(self, path: str, value: Any, depth: int) -> None:
        if depth > _DEEPEST or isinstance(value, (*_PLAIN, Tensor, type)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._look_into(_own(module), path, depth + 1)
        elif is_container(value):
            self._keep(path, value, depth)
        elif isinstance(value, tuple):
            self._look_into(dict(enumerate(value)), path, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType | types.BuiltinMethodType):
            self._look(path, value.__self__, depth)
            self._look(path, getattr(value, "__func__", None), depth)
        elif isinstance(value, functools.partial):
            self._look_into({"": value.func, **dict(enumerate(value.args)), **value.keywords}, path, depth + 1)
        elif (state := drawn(value)) is not None:
            self._generators.append((value, state))
        else:
            self._object(path, value, depth)

    def _look_into(self, values: dict[Any, Any], path: str, depth: int) -> None:
        for name, value in values.items():
            if not isinstance(value, _PLAIN):
                self._look(joined(path, name), value, depth)

    def _keep(self, path: str, container: Any, depth: int) -> None:
        parts = contents(container)
        self._containers[id(container)] = path, container, parts
        if len(parts) <= _MANY:
            values = dict(zip(parts[::2], parts[1::2], strict=True)) if isinstance(container, dict) else None
            self._look_into(dict(enumerate(parts)) if values is None else values, path, depth + 1)

    def _object(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if not _is_theirs(kind):
            return
        slots = [name for each in kind.__mro__ for name in slots_of(each)]
        if slots:
            read = functools.partial(_attributes, value, slots)
            self._note(value, path, read, functools.partial(_set_attribute, object, value), depth)
        if isinstance(getattr(value, "__dict__", None), dict):
            self._keep(path, vars(value), depth)
        self._look(path, vars(kind).get("__call__"), depth + 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if not is_users(function.__code__.co_filename):
            return
        space, code = function.__globals__, function.__code__
        for name in names_in(code) & space.keys():
            value = space[name]
            if isinstance(value, type):
                self._class(value)
            elif not isinstance(value, types.FunctionType) or value.__globals__ is space:
                self._look(name, value, depth + 1)
        if names := names_in(code, "STORE_GLOBAL"):
            read, write = functools.partial(_items, space, names), functools.partial(_set_item, space)
            self._note(space, "", read, write, depth)
        if function.__closure__:
            read, write = functools.partial(in_closure, function), functools.partial(_set_variable, function)
            self._note(function, "", read, write, depth)
        given = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        self._look_into(given, function.__name__, depth + 1)

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if _is_theirs(each) and id(each) not in self._seen:
                self._seen.add(id(each))
                read, write = functools.partial(_of_class, each), functools.partial(_set_attribute, type, each)
                self._note(each, each.__name__, read, write, 1)

    def _note(
        self,
        owner: Any,
        path: str,
        read: Callable[[], dict[str, Any]],
        write: Callable[[str, Any], None],
        depth: int,
    ) -> None:
        kept = read()
        self._names.append((owner, _Names(path, read, write, kept)))
        self._look_into(kept, path, depth + 1)


@contextmanager
def surroundings_put_back(models: Iterable[nn.Module], *functions: Callable[..., Any] | None) -> Iterator[None]:
    """Put back afterwards what the code of models and functions may write to besides the models."""
    surroundings = Surroundings(models, *functions)
    try:
        yield
    finally:
        surroundings.restore()


def _is_theirs(kind: type) -> bool:
    name: Any = kind.__module__  # of a class of operators, what gives it to one of them
    return isinstance(name, str) and name.partition(".")[0] not in _NOT_THEIRS


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def _others(now: list[Any], kept: list[Any]) -> list[Any]:
    """What stands now where something else did, or nothing."""
    return [part for i, part in enumerate(now) if i >= len(kept) or part is not kept[i]]


def _new(now: list[Any], kept: list[Any]) -> list[Any]:
    """What is there now and was not, wherever."""
    before = set(map(id, kept))
    return [part for part in now if id(part) not in before]


def _has_tensors(value: Any) -> bool:
    return any(isinstance(each, Tensor) for each in in_reach(value))


def _is_result(value: Any) -> bool:
    """Whether this is what a step gives: a number, a tensor or what holds one."""
    return _is_number(value) or _has_tensors(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _attributes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    found = {name: getattr(value, name, _GONE) for name in names}
    return {name: each for name, each in found.items() if each is not _GONE}


def _of_class(kind: type) -> dict[str, Any]:
    """What a class has but for what makes it one."""
    return {k: v for k, v in vars(kind).items() if not (k.startswith("__") or callable(v) or hasattr(v, "__get__"))}


def _items(space: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: space[name] for name in names if name in space}


def _set_attribute(kind: Any, owner: Any, name: str, value: Any) -> None:
    """As ``kind`` sets one, past what the owner's class does then."""
    if value is _GONE:
        kind.__delattr__(owner, name)
    else:
        kind.__setattr__(owner, name, value)


def _set_item(space: dict[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        del space[name]
    else:
        space[name] = value


def _set_variable(function: types.FunctionType, name: str, value: Any) -> None:
    """One that the function has from around it."""
    cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
    if value is _GONE:
        del cell.cell_contents
    else:
        cell.cell_contents = value
