"""A number that grows whenever a dictionary changes. Torch only; part of every artifact.

Private API: PyTorch's compiler keeps such numbers for guards of its own, from the tags that dictionaries had until
Python 3.11 and by watching them since. Python has no public way. Where it is gone, or misses what is set on an object,
as Python 3.13.0 lets it (python/cpython issue 125608), ``version_of`` is None, and guards compare everything in each
call, which takes about twice as long.
"""

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


_found: Version | None = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "dict_version", None)
version_of = _found if _found is not None and _notices(_found) else None
