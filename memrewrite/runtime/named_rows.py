"""Rows of the code that forward leads to and of what it names outside of the module. Torch only; part of artifacts.

A notebook defines functions and constants anew, and ``%autoreload`` gives functions that are there another code.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from memrewrite.runtime.code_inside import without_lines
from memrewrite.runtime.differences import ABSENT, another_object, another_value
from memrewrite.runtime.named_code import is_the_users, led_to_by_forward
from memrewrite.runtime.plain_values import is_plain
from memrewrite.runtime.rows import Row


def named_rows(modules: Iterable[nn.Module], form: Callable[[Any], Any]) -> Iterator[Row]:
    """Two rows: of code by functions, and of values by names, of which ``form`` gives what is compared."""
    modules = [*modules]
    bases = dict.fromkeys(base for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__)
    kinds = [base for base in bases if is_the_users(base.__module__)]
    functions, places = led_to_by_forward(kinds, (value for each in modules for value in vars(each).values()))
    places = [place for place in places if not isinstance(place[1](), ModuleType | list)]  # a list, code may fill
    labels, names = [each.__qualname__ for each in functions], [name for name, _ in places]
    yield Row(lambda: [*map(_its_code, functions)], lambda: labels, _another_code)

    def another(label: str, then: Any, now: Any) -> str:
        if isinstance(then, FunctionType) and isinstance(now, FunctionType):
            same = form(_given_to(then)) == form(_given_to(now))
            return _another_code(label, _its_code(then), _its_code(now) if same else None)
        if now is ABSENT or (is_plain(then) and is_plain(now)):
            return "" if form(then) == form(now) else another_value(label, then, now)
        return another_object(label, form(then), form(now))

    yield Row(lambda: [find() for _, find in places], lambda: names, another)


_its_code = operator.attrgetter("__code__")
_given_to = operator.attrgetter("__defaults__", "__kwdefaults__", "__closure__")


def _another_code(label: str, then: Any, now: Any) -> str:
    """That a function was edited, "" where it only stands elsewhere, as if its cell ran again."""
    return "" if now and without_lines(then) == without_lines(now) else f"{label} was edited since"
