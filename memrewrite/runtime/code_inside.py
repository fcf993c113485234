"""The code of a function with all that is inside it. Python only; part of every artifact."""

from collections.abc import Iterator
from types import CodeType


def codes_inside(code: CodeType) -> Iterator[CodeType]:
    """The code and that of the functions, classes and comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_inside(each)


def names_inside(code: CodeType) -> Iterator[str]:
    """All names that code has for what is neither a local nor a constant, attributes of modules among them."""
    return (name for each in codes_inside(code) for name in each.co_names)


def without_lines(code: CodeType) -> CodeType:
    """The code as it would be wherever it stands in a file."""
    constants = tuple(without_lines(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=constants)
