"""What forward leads to in the user's own modules besides classes: functions and values that its code names.

def forward(self, x):                   functions: scaled
    return scaled(x) * layers.GAIN      values: GAIN, and those that scaled names

Of a dictionary, and of an object or class of the user's, values are those whose names code has: CONFIG["gain"] is
CONFIG.gain. All methods of such a class are led to, as those of a torch.autograd.Function.
What is imported while forward runs is left out, as it may not be there yet, and so is what code assigns itself.
"""

import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from memrewrite.runtime.code_inside import codes_inside, names_inside
from memrewrite.runtime.differences import ABSENT

Place = tuple[str, Callable[[], Any]]
"""The name that code has for a value, and what finds it where it lies."""

_LIBRARIES = {"builtins", "memrewrite", "numpy", "torch", *sys.stdlib_module_names}
_PLACES = {"site-packages", "dist-packages"}


def named_by_forward(
    kinds: Iterable[type], held: Iterable[Any] = ()
) -> tuple[list[FunctionType], list[tuple[str, Any]]]:
    """The user's functions that forward of these classes leads to, and all values by the names that code has for them.

    ``held`` are attributes of modules, of which functions are led to as well.
    """
    kinds = [*kinds]
    functions, places = led_to_by_forward(kinds, held)
    own = {each for kind in kinds for value in vars(kind).values() for each in _functions(value)}
    return [each for each in functions if each not in own], [(name, find()) for name, find in places]


def led_to_by_forward(kinds: Iterable[type], held: Iterable[Any]) -> tuple[list[FunctionType], list[Place]]:
    """The same with the methods of these classes, and with what finds each value where it lies."""
    methods = [(name, each) for kind in kinds for name, value in vars(kind).items() for each in _functions(value)]
    functions: dict[FunctionType, None] = {}
    places: list[Place] = []
    assigned, names = set[str](), {"forward"}
    waiting = deque(each for name, each in methods if name == "forward")
    waiting.extend(each for value in held for each in _functions(value))
    while waiting:
        function = waiting.popleft()
        if function in functions:
            continue
        functions[function] = None
        instructions = [each for code in codes_inside(function.__code__) for each in dis.get_instructions(code)]
        assigned |= _assigned(instructions)
        attributes = {*names_inside(function.__code__)} - names
        names |= attributes
        waiting.extend(each for name, each in methods if name in attributes)
        for name, find in _globals(function, instructions):
            value = find()
            waiting.extend(each for one in (value, *_members(value).values()) for each in _functions(one))
            places.append((name, find))
    return [*functions], [(name, find) for name, find in places if not assigned & {*name.split(".")}]


def _globals(function: FunctionType, instructions: list[dis.Instruction]) -> Iterator[Place]:
    """What its code finds in its module, and in modules of the user's that it names, by its name there."""
    space = function.__globals__
    attributes, words = {*names_inside(function.__code__)}, _texts_in(instructions)
    for name in sorted({str(each.argval) for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}):
        value = space.get(name, function)  # a builtin is none of the user's
        if isinstance(value, ModuleType) and is_the_users(value.__name__):
            for inner in sorted(attributes & vars(value).keys()):
                yield from _entries(inner, functools.partial(vars(value).get, inner, ABSENT), attributes | words)
        elif value is not function:
            yield from _entries(name, functools.partial(space.get, name, ABSENT), attributes | words)


def _entries(name: str, find: Callable[[], Any], words: set[str], depth: int = 3) -> Iterator[Place]:
    """A value by its name; of a dictionary, or an object of the user's, what it has by ``words``."""
    value = find()
    kind = type(value)
    plain = kind.__module__ in ("types", "argparse") or (is_the_users(kind.__module__) and not callable(value))
    inside = value if kind is dict else getattr(value, "__dict__", None) if plain else _members(value)
    if not inside or not depth or not isinstance(inside, dict):
        yield name, find
        return
    if isinstance(value, type):
        yield name, find
    for key in sorted(words & {each for each in inside if isinstance(each, str)}):
        yield from _entries(f"{name}.{key}", functools.partial(_inside, find, key), words, depth - 1)


def _inside(find: Callable[[], Any], key: str) -> Any:
    """What has this name in what is found by then."""
    owner = find()
    return (owner if type(owner) is dict else getattr(owner, "__dict__", {})).get(key, ABSENT)


def _members(value: Any) -> dict[str, Any]:
    """What a class of the user's has that is no module, such as a function with a backward of its own; else nothing."""
    own = isinstance(value, type) and not issubclass(value, nn.Module) and is_the_users(value.__module__)
    return dict(vars(value)) if own else {}


def _assigned(instructions: list[dis.Instruction]) -> set[str]:
    """The names that code assigns, and all text in code that assigns items."""
    names = {str(each.argval) for each in instructions if each.opname in ("STORE_GLOBAL", "STORE_ATTR")}
    return names | (_texts_in(instructions) if any(each.opname == "STORE_SUBSCR" for each in instructions) else set())


def _texts_in(instructions: list[dis.Instruction]) -> set[str]:
    constants = (each.argval for each in instructions if each.opname.startswith("LOAD_CONST"))
    return {each for each in constants if isinstance(each, str)}


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
    if isinstance(value, FunctionType) and is_the_users(value.__module__):
        yield value


def is_the_users(module: str | None) -> bool:
    """Whether a module is neither Python's or PyTorch's nor of an installed package."""
    top = str(module).partition(".")[0]
    return top not in _LIBRARIES and not _is_installed(getattr(sys.modules.get(top), "__file__", None) or "")


@functools.cache
def _is_installed(file: str) -> bool:
    return bool(_PLACES & {*PurePath(file).parts})
