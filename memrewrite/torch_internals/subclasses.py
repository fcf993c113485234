"""The classes that come of a class, by those that there are now."""

from collections.abc import Iterator
from typing import Any


def subclasses(kind: Any) -> Iterator[Any]:
    """All of them, near and far; each once."""
    found, ahead = set[Any](), [*kind.__subclasses__()]
    while ahead:
        each = ahead.pop()
        if each not in found:
            found.add(each)
            ahead += each.__subclasses__()
            yield each
