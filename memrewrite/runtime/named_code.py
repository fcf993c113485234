"""What forward leads to in the user's own modules besides classes: functions and values that its code names.

def forward(self, x):                   functions: scaled
    return scaled(x) * layers.GAIN      values: GAIN, and those that scaled names

What is imported while forward runs is left out, as it may not be there yet, and so is what code assigns itself.
"""

import dis
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_LIBRARIES = {"builtins", "memrewrite", "numpy", "torch", *sys.stdlib_module_names}
_PLACES = {"site-packages", "dist-packages"}


def named_by_forward(
    kinds: Iterable[type], held: Iterable[Any] = ()
) -> tuple[list[FunctionType], list[tuple[str, Any]]]:
    """The user's functions that forward of these classes leads to, and all values by the names that code has for them.

    ``held`` are attributes of modules, of which functions are led to as well.
    """
    methods = [(name, each) for kind in kinds for name, value in vars(kind).items() for each in _functions(value)]
    functions: dict[FunctionType, None] = {}
    values: list[tuple[str, Any]] = []
    assigned, names = set[str](), {"forward"}
    waiting = deque(each for name, each in methods if name == "forward")
    waiting.extend(each for value in held for each in _functions(value))
    while waiting:
        function = waiting.popleft()
        if function in functions:
            continue
        functions[function] = None
        instructions = [each for code in _codes(function.__code__) for each in dis.get_instructions(code)]
        assigned |= {str(each.argval) for each in instructions if each.opname == "STORE_GLOBAL"}
        attributes = _attributes_named(function) - names
        names |= attributes
        waiting.extend(each for name, each in methods if name in attributes)
        for name, value in _globals(function, instructions):
            waiting.extend(_functions(value))
            values.append((name, value))
    own = {each for _, each in methods}
    return [each for each in functions if each not in own], [pair for pair in values if pair[0] not in assigned]


def _globals(function: FunctionType, instructions: list[dis.Instruction]) -> Iterator[tuple[str, Any]]:
    """What its code finds in its module, and in modules of the user's that it names, by its name there."""
    space = function.__globals__
    attributes = sorted(_attributes_named(function))
    for name in sorted({str(each.argval) for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}):
        value = space.get(name, function)  # a builtin is none of the user's
        if isinstance(value, ModuleType) and _is_the_users(value.__name__):
            yield from ((inner, vars(value)[inner]) for inner in attributes if inner in vars(value))
        elif value is not function:
            yield name, value


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and that of the functions and comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _attributes_named(function: FunctionType) -> set[str]:
    """All names that its code has for what is neither a local nor a constant, attributes among them."""
    return {name for code in _codes(function.__code__) for name in code.co_names}


def _functions(value: Any) -> Iterator[FunctionType]:
    """The function of the user's that a value is, in whatever decorators made of it."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial | functools.partialmethod):
        value = value.func
    elif isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    while "__wrapped__" in getattr(value, "__dict__", ()):
        value = vars(value)["__wrapped__"]
    if isinstance(value, FunctionType) and _is_the_users(value.__module__):
        yield value


def _is_the_users(module: str | None) -> bool:
    """Whether a module is neither Python's or PyTorch's nor of an installed package."""
    top = str(module).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top not in _LIBRARIES and not _PLACES & {*PurePath(file).parts}
