"""Is a module still what its program was captured from? Torch only; part of every artifact.

A program holds what forward read while it was captured: strides, rates, which children there are, whose forward runs.
That is noted when a drop-in is built and compared in every call, whole lists at a time by C code, as the benchmark
``guards`` times it. What lies in dictionaries that nobody wrote to since is as it was, and where one number tells that
nobody wrote to any, they are not looked at. Of parameters and buffers only types and shapes matter: a program looks
them up when it runs.
"""

import functools
import itertools
import marshal
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from memrewrite.runtime.dict_versions import TICKS, moment, version_of
from memrewrite.runtime.differences import (
    ABSENT,
    HOOKS,
    WITHIN_CACHED,
    another_dictionary,
    another_forward,
    another_hook,
    another_member,
    another_module,
    another_object,
    another_table,
    another_value,
    gathered_table,
    has_parts,
    joined,
    kind_of,
)
from memrewrite.runtime.named_rows import named_rows
from memrewrite.runtime.plain_values import as_bytes, is_constant, is_plain
from memrewrite.runtime.recorders import matter
from memrewrite.runtime.rows import Row, bodies

Holder = str | tuple[Any, ...]
"""The path of a submodule; or that, and the attributes and keys that lead from there to an object it holds."""
Reads = tuple[tuple[tuple[str, ...], tuple[Holder, ...]], ...]
"""Names of attributes and the holders they were read of; ``_modules`` for all children, ``__dict__`` for all names."""
Noted = tuple[bytes, dict[str, list[str]]]

TABLES = ("_modules", "_parameters", "_buffers")


def _wrapped(root: Callable[[], nn.Module | None]) -> Callable[[], bool]:
    """Tells whether parameters of a module are of classes of their own, as of quantized weights.

    Code that is traced asks once, as it guards on the kinds of those that it reads anyway.
    """

    def told() -> bool:
        module = root()
        return module is not None and any(map(has_parts, module.parameters()))

    vars(told)["_dynamo_marked_constant"] = True
    return told


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """All hooks of a module itself."""
    return (hook for kind in HOOKS for hook in (vars(module)[kind] or {}).values())


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)  # equal wherever they come from


class Guards:
    """What the program of ``root``, of the user's class ``base``, depends on, as it is when this is made.

    ``training`` has the flags of submodules at capture by path, ``constants`` are the tensors that the program holds,
    ``then`` is what the drop-in that ``root`` is a copy of has ``noted``; ``gathered`` is the type that parameters are
    in while forward runs, if it is another one than now.
    """

    def __init__(
        self,
        root: nn.Module,
        base: type,
        reads: Reads,
        training: dict[str, bool],
        constants: Iterable[Tensor] = (),
        then: Noted | None = None,
        gathered: torch.dtype | None = None,
    ) -> None:
        self._baked = {id(tensor) for tensor in constants}
        plain, self._known = then or (b"", {})
        self._owners: dict[str, dict[str, Any]] = {}  # attributes of the modules that forward reads of
        self._called: dict[str, nn.Module] = {}  # those modules; not the root, whose end this must not put off
        self._root = weakref.ref(root)
        self.wrapped = _wrapped(self._root)
        self._objects: list[tuple[str, Any]] = []  # what else it reads attributes of
        self._by_attributes: set[int] = set()  # dictionaries among those of which it asks for no item
        self._lists: list[tuple[str, dict[str, Any]]] = []  # all children of a module
        self._children: list[tuple[str, dict[str, Any], str]] = []
        self._tables: list[tuple[str, dict[str, Any]]] = []  # parameters and buffers
        self._members: dict[tuple[type, str], None] = {}  # what was found on a class
        self._absent: dict[str, list[str]] = {}  # names that a module itself has not, by its path
        self._missing: list[tuple[str, dict[str, Any], str]] = []  # those that its class has not either, by table
        self._plain: list[tuple[str, dict[str, Any], list[str]]] = []  # attributes by the dictionary they lie in
        self._computed: list[tuple[str, Any, str]] = []  # plain values that an object computes
        self._others: list[tuple[str, Callable[[], Any]]] = []  # functions, tensors, lists of modules
        inside = dict(root.named_modules(remove_duplicate=False))
        for names, holders in reads:
            for holder in holders:
                owner = _at(inside, holder)
                if isinstance(holder, str) and isinstance(owner, nn.Module):
                    self._note_module(holder, owner, base if owner is root else type(owner), names)
                elif owner is not ABSENT:
                    self._note_object(".".join(str(part) for part in holder if part != ""), owner, names)
        if any(map(parametrize.is_parametrized, inside.values())):
            self._computed.append(("parametrize", parametrize, "_cache_enabled"))
        self._rows, self._version, self._loose_then = list(self._make_rows()), 0, b""
        self._moment: object = None  # of the last call in which all was as it was
        self._empty: list[dict[str, Any]] = []  # those that were empty then
        self._unwatched = [row for row in self._rows if not row.watched]
        self._untimed = [row for row in self._unwatched if not row.timed]
        children = [d for _, d in self._lists] + [d for _, d, _ in self._children]
        tables = [d for _, d in self._tables]  # where there are moments, dearer to ask for versions than to compare
        asked = [] if TICKS else tables
        self._watched = _to_watch(*self._owners.values(), *(d for _, d, _ in self._plain), *children, *asked)
        self._timed = _to_watch(*tables) if TICKS else []
        self._getters = [operator.itemgetter(*names) for *_, names in self._plain]
        self._holders = [attributes for _, attributes, _ in self._plain]
        self._mutable = [
            (found, name)
            for _, found, names in self._plain
            for name in names
            if type(found) is not dict or not is_constant(found[name])
        ]
        self.plain = plain or as_bytes(self._values(training))
        self._settle()
        self.gathered = gathered
        for row in self._rows if gathered is not None else ():
            row.then = [gathered_table(d, gathered) for d in row.then] if row.reason is another_table else row.then

    def _note_module(self, path: str, module: nn.Module, kind: type, names: Iterable[str]) -> None:
        self._owners[path] = attributes = vars(module)
        if path:
            self._called[path] = module
        if "_modules" in names:
            self._lists.append((path, attributes["_modules"]))
        tables = attributes["_parameters"], attributes["_buffers"]
        self._tables += [(path, table) for table in tables if table]
        own = []
        for name in self._asked_for(path, attributes, names):
            if name in attributes["_modules"]:
                self._children.append((joined(path, name), attributes["_modules"], name))
            elif name in attributes:
                own += [] if name in _OF_EVERY_MODULE else [name]
            elif not any(name in table for table in tables):
                self._members[kind, name] = None
                if path or name != "forward":  # one put around the drop-in's own, as accelerate does, calls that
                    self._absent.setdefault(path, []).append(name)
                if getattr(kind, name, ABSENT) is ABSENT:
                    self._missing += [(joined(path, name), attributes[table], name) for table in TABLES]
        self._note_attributes(path, attributes, own)

    def _note_object(self, label: str, owner: Any, names: Iterable[str]) -> None:
        attributes = getattr(owner, "__dict__", {})
        if owner is not self._root():
            self._objects.append((label, owner))
        if isinstance(owner, dict) and not any(hasattr(type(owner), name) for name in names):
            self._by_attributes.add(id(owner))
        self._note_attributes(label, attributes, self._asked_for(label, attributes, names))
        for name in names:
            if name in attributes or name == "__dict__":
                continue
            value = getattr(owner, name, ABSENT)
            if is_plain(value):
                self._computed.append((label, owner, name))
            elif self._form(value) == self._form(getattr(owner, name, ABSENT)):  # and not made anew each time
                self._others.append((joined(label, name), _Getter(owner, name)))

    def _asked_for(self, label: str, attributes: dict[str, Any], names: Iterable[str]) -> Iterable[str]:
        """These names, or where forward asked for all there are, those at capture: it may have set others since."""
        return self._known.setdefault(label, [*attributes]) if "__dict__" in names else names

    def _note_attributes(self, label: str, attributes: dict[str, Any], names: Iterable[str]) -> None:
        there = [name for name in names if name in attributes]
        plain = [name for name in there if is_plain(attributes[name])]
        if plain:
            self._plain.append((label, attributes, plain))
        self._others += [(joined(label, n), _Getter(attributes, n)) for n in there if n not in plain]

    def _make_rows(self) -> Iterator[Row]:
        paths, modules, everyone = list(self._called), list(self._called.values()), list(self._owners.values())
        owners, listed, tables = [*map(vars, modules)], [d for _, d in self._lists], [d for _, d in self._tables]
        parents, names = [d for _, d, _ in self._children], [name for *_, name in self._children]
        kinds, members = [kind for kind, _ in self._members], [name for _, name in self._members]
        hooks: list[Any] = []
        get, flat, again = dict.get, itertools.chain.from_iterable, itertools.repeat
        watched = functools.partial(Row, watched=True)
        child = functools.partial(Row, watched=all(type(d) is dict for d in [*listed, *parents]))

        def hooked() -> list[Any]:
            found = [each if each and matter(each) else () for each in hooks] if any(hooks) else []
            return found if any(found) else []

        def hooked_anew() -> list[Any]:
            hooks[:] = flat(map(get, owners, again(kind), again(())) for kind in HOOKS)
            return hooked()

        yield watched(hooked_anew, lambda: paths * len(HOOKS), another_hook)
        yield Row(hooked, lambda: paths * len(HOOKS), another_hook)
        yield from bodies([*self._called.items(), *self._objects])
        yield Row(lambda: [vars(self._root())], lambda: ["__dict__"], another_dictionary, identical=True)
        yield watched(lambda: [*map(get, owners, again("forward"))], lambda: paths, another_forward)
        yield watched(lambda: [*map(len, everyone)], lambda: self._owners, self._new_attribute)
        children = [path for path, *_ in self._children]
        yield child(lambda: [*map(get, parents, names)], lambda: children, another_module)
        yield child(lambda: [*flat(map(dict.values, listed))], lambda: _items(self._lists), another_module)
        of_all = [joined(path, table) for path in self._owners for table in TABLES]
        own_tables = operator.itemgetter(*TABLES)
        yield watched(lambda: [*flat(map(own_tables, everyone))], lambda: of_all, another_dictionary, identical=True)
        copies, of_tables = lambda: [*map(dict, tables)], [path for path, _ in self._tables]
        timed = all(type(d) is dict for d in tables)
        yield Row(copies, lambda: of_tables, another_table, lambda: tables, timed and not TICKS, timed)
        places, unknown = [d for _, d, _ in self._missing], [name for *_, name in self._missing]
        new = [label for label, *_ in self._missing]
        yield Row(lambda: [*map(operator.contains, places, unknown)], lambda: new, _is_new)
        of_classes = [f"{kind.__name__}.{name}" for kind, name in self._members]
        yield Row(lambda: [*map(getattr, kinds, members, again(ABSENT))], lambda: of_classes, another_member)
        others = [label for label, _ in self._others]
        yield Row(lambda: [self._form(value()) for _, value in self._others], lambda: others, another_object)
        yield from named_rows(filter(None, [self._root(), *modules]), self._form)

    def hold(self) -> bool:
        """Whether nothing has changed; False also where it takes ``changed`` to tell."""
        try:
            now = moment()  # first of all: what is written from here on makes another one in the next call
            quiet, version = now is self._moment, self._version
            if not quiet:  # each version only grows
                version = 0 if version_of is None else sum(map(version_of, self._watched))
            if version and version == self._version and not any(self._empty):
                rows = self._untimed if quiet else self._unwatched
                held = all(row.holds() for row in rows) and as_bytes(self._loose()) == self._loose_then
            else:
                held = all(row.holds() for row in self._rows) and as_bytes(self._values()) == self.plain
                if held:  # to fill an empty one changes no version
                    self._empty = [table for table in [*self._watched, *self._timed] if not table]
            if held:  # else the next call, too, has to look at what is not watched
                self._moment, self._version = now, version
            return held
        except (KeyError, ValueError, TypeError, RuntimeError):  # gone, no longer plain, or other tensors
            return False

    def changed(self) -> str:
        """What is no longer as it was, "" if nothing is; then calls are compared with what there is now."""
        reason = next(self._changes(), "") or next(self._changed_values(), "")
        if not reason:
            self._settle()
            self.plain = as_bytes(self._values())
        return reason

    def lost_in_copies(self) -> str:
        """The same as far as a copy of the drop-in could not tell, which is given what this has ``noted``."""
        odd = any(name not in found or not is_plain(found[name]) for _, found, name, _ in self.compared)
        rows = (row for row in self._rows if self.gathered is None or row.reason is not another_table)
        changes = (reason for row in rows for reason in row.changes())
        return next(changes, "") or (next(self._changed_values(), "") if odd else "")

    @property
    def noted(self) -> Noted:
        """The plain values at capture as bytes, and the names of attributes where forward asked for all."""
        return self.plain, self._known

    @property
    def captured(self) -> list[Any]:
        """The plain values at capture: those of each dictionary, then what objects computed."""
        found: list[Any] = marshal.loads(self.plain)  # noqa: S302  (of our own making)
        return found

    def _changes(self) -> Iterator[str]:
        return (reason for row in self._rows for reason in row.changes())

    def _settle(self) -> None:
        """Compare with what there is now; ``compared`` has label, dictionary, key and value of each plain value."""
        self._version, self._moment = 0, None
        for row in self._rows:
            row.then = [] if row.reason is another_hook else row.now()
        self._loose_then = as_bytes(self._loose())
        captured = self.captured
        self.compared = [
            (joined(label, name), attributes, name, value)
            for (label, attributes, names), values in zip(self._plain, captured[: len(self._plain)], strict=True)
            for name, value in zip(names, values if len(names) > 1 else [values], strict=True)
        ]

    def _values(self, training: dict[str, bool] | None = None) -> list[Any]:
        """The plain values now, with the flags of ``training`` if it is given."""
        values = [*map(operator.call, self._getters, self._holders)]
        if training is not None:
            for place, (path, _, names) in enumerate(self._plain):
                if "training" in names and path in training:
                    found = [training[path] if name == "training" else self._plain[place][1][name] for name in names]
                    values[place] = tuple(found) if len(found) > 1 else found[0]
        return [*values, *(getattr(owner, name, ABSENT) for _, owner, name in self._computed)]

    def _loose(self) -> list[Any]:
        """Those of the plain values that can change where no dictionary does."""
        mutable = [attributes[name] for attributes, name in self._mutable]
        return [*mutable, *(getattr(owner, name, ABSENT) for _, owner, name in self._computed)]

    def _changed_values(self) -> Iterator[str]:
        for label, attributes, name, then in self.compared:
            now = attributes.get(name, ABSENT)
            if self._form(now) != self._form(then):
                if name == "training":
                    yield f"{label.removesuffix('.training')} was captured in {'train' if then else 'eval'} mode"
                yield another_value(label, then, now)
        computed = self.captured[len(self._plain) :]
        for (label, owner, name), then in zip(self._computed, computed, strict=True):
            if self._form(now := getattr(owner, name, ABSENT)) != self._form(then):
                if owner is parametrize:
                    yield WITHIN_CACHED
                yield another_value(joined(label, name), then, now)

    def _new_attribute(self, path: str, then: int, now: int) -> str:
        """A module has more or fewer attributes: is one new that forward asked for?"""
        new = (name for name in self._absent.get(path, ()) if name in self._owners[path])
        return next((f"{joined(path, name)} is new" for name in new), "")

    def _form(self, value: Any) -> Any:
        """What is compared of a value: types and plain values, kinds of tensors that are looked up, else identity."""
        if isinstance(value, Tensor) and id(value) not in self._baked:
            return Tensor, kind_of(value)
        if isinstance(value, dict) and id(value) not in self._by_attributes:
            return dict, *((self._form(key), self._form(item)) for key, item in value.items())
        if isinstance(value, list | tuple | deque):
            return type(value), *map(self._form, value)
        return (type(value), value) if isinstance(value, _NAMED) or is_plain(value) else _Same(value)


@dataclass(frozen=True)
class _Getter:
    """An attribute of an object, or an item of a dictionary, as it is when this is called."""

    owner: Any
    name: str

    def __call__(self) -> Any:
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, ABSENT)
        return getattr(self.owner, self.name, ABSENT)


class _Same:
    """Equal to another one of the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _to_watch(*dictionaries: dict[str, Any]) -> list[dict[str, Any]]:
    """These, each once, from now on watched; none where they have no versions."""
    found = [*{id(d): d for d in dictionaries if type(d) is dict}.values()]
    if version_of is None:
        return []
    deque(map(version_of, found), maxlen=0)
    return found


def _at(modules: dict[str, nn.Module], holder: Holder) -> Any:
    """The module or object at this place, ``ABSENT`` where there is none (any more)."""
    if isinstance(holder, str):
        return modules.get(holder, ABSENT)
    value: Any = modules.get(holder[0], ABSENT)
    for part in holder[1:]:
        try:
            value = value[part] if isinstance(value, dict | list | tuple | deque) else getattr(value, part)
        except (AttributeError, LookupError, TypeError):
            return ABSENT
    return value


def _is_new(label: str, then: Any, now: Any) -> str:
    return f"{label} is new"


def _items(tables: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    return (joined(path, name) for path, table in tables for name in table)
