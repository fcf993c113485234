"""A number that grows whenever a dictionary changes. Torch only; part of every artifact.

Private API: PyTorch's compiler keeps such numbers for guards of its own, from the tags that dictionaries had until
Python 3.11 and by watching them since. Python has no public way. Where it is gone, or misses what is set on an object,
as Python 3.13.0 lets it (python/cpython issue 125608), ``version_of`` is None, and guards compare everything in each
call, which takes several times as long.

What it does not notice since Python 3.12 is that an empty dictionary is filled at once, by ``update`` with another one:
look at those that are empty.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

Version = Callable[[dict[str, Any]], int]


class _Written:
    """An object whose attributes lie where Python has them fastest."""

    def __init__(self) -> None:
        self.a, self.b = 0, 0


def _notices(version: Version) -> bool:
    """Whether it grows at each of many writes, so that Python has made them as fast as it can, and at no read."""
    written = _Written()
    table = vars(written)
    for number in range(1, 1000):
        before = version(table)
        if written.a + written.b == number - 1 and version(table) != before:
            return False
        if number % 2:
            written.a += 1
        else:
            setattr(written, "b", written.b + 1)  # noqa: B010  (the slower way)
        if version(table) <= before:
            return False
    return True


class Clock:
    """Called, the moment: the same object as before if no dictionary whose version was asked for changed since.

    Since Python 3.12 versions are numbers of one sequence, of which every change of any such dictionary takes one, and
    so does each that is seen for the first time, as this one is. Two in a row had no change between them, whatever
    lies in how many dictionaries. Other threads, and other clocks, take numbers too: then it is another moment.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        self._last = 0
        self._moment = object()

    def __call__(self) -> object:
        """Another moment is never one that there was before, not even where threads overtake each other here."""
        number = self._version({})
        if number != self._last + 1:
            self._moment = object()
        self._last = number
        return self._moment


def _counts(version: Version) -> bool:
    """Whether changes of dictionaries take numbers, and nothing else does."""
    clock, table = Clock(version), {"a": 0}
    changes: list[Callable[[], object]] = [
        lambda: table.update(a=table["a"] + 1),
        lambda: table.setdefault("b", 0),
        lambda: table.pop("b"),
        table.clear,
        lambda: table.__setitem__("a", 0),
    ]
    for change in changes * 100:
        version(table)
        then = clock()
        if clock() is not then or table.get("b") or clock() is not then:
            return False
        change()
        if clock() is then:
            return False
    return True


_found: Version | None = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "dict_version", None)
version_of = _found if _found is not None and _notices(_found) else None
# Until Python 3.11 all dictionaries of the process take of these numbers, and no two calls have any in a row.
TICKS = version_of is not None and sys.version_info >= (3, 12) and _counts(version_of)
moment: Callable[[], object] = Clock(version_of) if version_of is not None and TICKS else object
