"""The contents of dicts, lists, sets and deques, whatever a subclass makes of reading and writing them; of closures.

A subclass may refuse to be written, as frozen configurations do, or do more than it is asked for, as lists that tell
others do. The methods of the builtin type see the contents, put them and copy them, and nothing else happens.
"""

import contextlib
import itertools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from types import FunctionType
from typing import Any

_KINDS: tuple[type[Any], ...] = (OrderedDict, defaultdict, dict, list, set, deque)


def is_container(value: object) -> bool:
    """Whether the value is a container whose contents can be put back."""
    return isinstance(value, _KINDS)


def contents(container: Any) -> list[Any]:
    """What is in it, in its order: of a dict, each key and after it the value."""
    kind = _kind(container)
    if issubclass(kind, dict):
        return list(itertools.chain.from_iterable(kind.items(container)))
    return list(kind.__iter__(container))


def put(container: Any, parts: Sequence[Any]) -> None:
    """Make ``parts``, as ``contents`` gives them, all that is in it."""
    kind = _kind(container)
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            kind.__setitem__(container, key, value)
    elif kind is set:
        set.update(container, parts)
    else:
        kind.extend(container, parts)


def put_back(container: Any, parts: Sequence[Any]) -> None:
    """``put``, but where the container holds those very objects already nothing is written."""
    now = contents(container)
    if len(now) != len(parts) or not all(map(operator.is_, now, parts)):
        put(container, parts)


def copied(container: Any) -> Any:
    """A container of the same type with the same contents and attributes, as ``copy.copy`` makes one of plain types."""
    kind = _kind(container)
    new = kind.__new__(type(container))
    if kind is defaultdict:
        kind.__init__(new, container.default_factory)
    elif kind is deque:
        kind.__init__(new, (), container.maxlen)
    state = object.__getstate__(container) if type(container) is not kind else None
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(new).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(new, name, value)
    put(new, contents(container))
    return new


def in_closure(function: FunctionType) -> dict[str, Any]:
    """The variables that a function has from around it, but for those that have no value yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _kind(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _KINDS else next(kind for kind in _KINDS if isinstance(container, kind))
