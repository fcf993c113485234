"""What forward reads while it is rehearsed: which attributes of which modules, and of the objects they hold.

    self.conv(x) * self.config.scale     # "conv" of the model, "stride", "forward", ... of conv, "scale" of its config

A captured graph holds what these were. Reads are observed where Python makes them, so they are found however they are
spelled (``getattr``, a property, a loop over the children), and an attribute that forward sets before it reads it is
none: it follows from the inputs.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, cast
from unittest import mock

from torch import nn

from memrewrite.capture.looks import looks, way
from memrewrite.runtime.guards import Holder, Reads
from memrewrite.runtime.recorders import INSTALLED
from memrewrite.state.attributes import CONTAINERS, OPAQUE

_MODULE_CODE = cast(Any, sys.modules[nn.Module.__module__]).__file__
_OWN = frozenset(vars(nn.Module())) - {"training", "_modules"}
_OF_ITEMS = (
    "__getitem__",
    "__contains__",
    "__iter__",
    "__reversed__",
    "__len__",
    "__eq__",
    "__ne__",
    "__or__",
    "__ror__",
)
_DEEPEST = 4  # steps from a module to an object it holds


class ReadsOfForward:
    """The reads of ``module``'s forward, which runs while ``observed()`` is open."""

    def __init__(self, module: nn.Module) -> None:
        self._owners: dict[Holder, Any] = dict(module.named_modules())
        self._holders: dict[int, Holder] = {id(owner): path for path, owner in self._owners.items()}
        self._read: dict[Holder, dict[str, None]] = {}
        self._written: set[tuple[int, str]] = set()
        self._made: set[tuple[int, str]] = set()  # what was not there when it was read
        self._watched: set[type] = set()

    @property
    def found(self) -> Reads:
        """The names that were read together, and the holders that each of them was read of."""
        together: dict[tuple[str, ...], list[Holder]] = {}
        for holder, names in self._read.items():
            together.setdefault(tuple(sorted(names)), []).append(holder)
        return tuple((names, tuple(holders)) for names, holders in together.items())

    @property
    def looks(self) -> tuple[str, ...]:
        """What was read, as expressions in ``self``, of each holder before what it holds."""
        root, holders = self._owners[""], sorted(self._read, key=lambda holder: len(way(holder)))
        return tuple(look for h in holders for look in looks(root, h, self._owners[h], self._read[h], self._new(h)))

    def _new(self, holder: Holder) -> set[str]:
        """Of what was read, what was not there then."""
        return {name for name in self._read[holder] if (id(self._owners[holder]), name) in self._made}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Note what is read meanwhile, in whichever thread."""
        with ExitStack() as patches:
            self._patches = patches
            self._watch(nn.Module)
            assign = nn.Module.__setattr__

            def set_attribute(module: nn.Module, name: str, value: Any) -> None:
                read = name in self._read.get(self._holders.get(id(module), ""), ())
                if read and not hasattr(module, name):
                    self._made.add((id(module), name))
                assign(module, name, value)
                if not read:
                    self._written.add((id(module), name))

            patches.enter_context(mock.patch.object(nn.Module, "__setattr__", set_attribute))
            yield

    def _watch(self, kind: type) -> None:
        """See what is read of objects of a class; there is no seeing it of one object."""
        read: Any = kind.__getattribute__

        def get_attribute(owner: Any, name: str) -> Any:
            holder = holders.get(id(owner))
            if holder is None or not _counts(name, sys._getframe(1)):
                return read(owner, name)
            if (id(owner), name) not in self._written:
                self._read.setdefault(holder, {})[name] = None
            value = read(owner, name)
            self._follow(value, (holder, name) if isinstance(holder, str) else (*holder, name))
            return value

        holders = self._holders
        self._patches.enter_context(mock.patch.object(kind, "__getattribute__", get_attribute))
        for name in _OF_ITEMS if issubclass(kind, dict) else ():
            self._watch_items(kind, name)

    def _watch_items(self, kind: type, name: str) -> None:
        """See that items are asked for, of a dictionary that has attributes, too: by what Python calls itself."""
        ask: Any = getattr(kind, name)

        def ask_for_items(owner: Any, *args: Any) -> Any:
            if (holder := self._holders.get(id(owner))) is not None:
                self._read.setdefault(holder, {})[name] = None
            return ask(owner, *args)

        self._patches.enter_context(mock.patch.object(kind, name, ask_for_items))

    def _follow(self, value: Any, holder: tuple[Any, ...]) -> None:
        """See what is read of an object that a module holds, also in a list or a dictionary."""
        if id(value) in self._holders or len(holder) > _DEEPEST + 1:
            return
        if type(value) in CONTAINERS or isinstance(value, tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value) if not isinstance(value, set) else ()
            for key, item in list(pairs):
                if isinstance(key, str | int):
                    self._follow(item, (*holder, key))
        elif isinstance(value, nn.Module) or _has_attributes(value):
            self._holders[id(value)], self._owners[holder] = holder, value
            if not isinstance(value, nn.Module) and type(value) not in self._watched:
                self._watched.add(type(value))
                self._watch(type(value))


def _has_attributes(value: Any) -> bool:
    """Whether this is an object with attributes, of a class that can be watched and is not PyTorch's own."""
    kind = type(value)
    settable = kind.__flags__ & (_OF_PYTHON | _FIXED) == _OF_PYTHON
    foreign = kind.__module__.partition(".")[0] not in ("torch", "builtins") and settable
    return foreign and hasattr(value, "__dict__") and not isinstance(value, OPAQUE)


# Py_TPFLAGS_HEAPTYPE: classes written in Python, whose attributes can be set, unless Py_TPFLAGS_IMMUTABLETYPE says that
# they cannot, as those of functools.
_OF_PYTHON, _FIXED = 1 << 9, 1 << 8


def _counts(name: str, reader: FrameType | None) -> bool:
    """Whether a read is forward's own: not one of what ``nn.Module`` does at each call, or at each look-up."""
    if name.startswith("__"):
        return name == "__dict__" and reader is not None and reader.f_code.co_filename != _MODULE_CODE
    if name in ("forward", "_modules"):
        return True
    return name not in _OWN and name != INSTALLED and (reader is None or reader.f_code.co_filename != _MODULE_CODE)
