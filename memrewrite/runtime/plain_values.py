"""Values that are numbers and text, which are compared as bytes. Torch only; part of every artifact."""

import marshal
from typing import Any


def is_plain(value: Any) -> bool:
    """Whether a value is all numbers, text and lists and dictionaries of such, which can be compared as bytes."""
    try:
        as_bytes(value)
    except ValueError:
        return False
    return True


def is_constant(value: Any) -> bool:
    """Whether a plain value cannot change."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_constant, value))
    return value is None or value is ... or isinstance(value, int | float | complex | str | bytes)


def as_bytes(value: Any) -> bytes:
    """Plain values as bytes, which tell 1 from True and 1.0. Version 2 of the format knows no shared objects."""
    return marshal.dumps(value, 2)
