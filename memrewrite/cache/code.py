"""The code of a function as text without its place in a file, and the names that it looks up.

def forward(self, x):                   code without line numbers, constants, names of locals
    return scaled(x) * layers.GAIN      globals: layers, scaled; attributes: GAIN
"""

import dis
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from memrewrite.runtime.code_inside import codes_inside


def texts(code: CodeType) -> Iterator[str]:
    """What code does, but for its constants: bytes that run and the names they mean."""
    for part in codes_inside(code):
        names = part.co_names, part.co_varnames, part.co_freevars, part.co_cellvars
        counts = part.co_argcount, part.co_posonlyargcount, part.co_kwonlyargcount, part.co_flags
        yield repr((part.co_code, part.co_exceptiontable, names, counts))


def constants(code: CodeType) -> Iterator[Any]:
    """The constants of code, those of inner code included."""
    return (each for part in codes_inside(code) for each in part.co_consts if not isinstance(each, CodeType))


def global_names(code: CodeType) -> list[str]:
    """The names that code looks up in its module."""
    instructions = (each for part in codes_inside(code) for each in dis.get_instructions(part))
    return sorted({str(each.argval) for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def imported_modules(code: CodeType, package: str) -> Iterator[tuple[str, ModuleType]]:
    """The modules that code imports while it runs; relative imports may be of any package above ``package``."""
    parts = package.split(".") if package else []
    above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    instructions = (each for part in codes_inside(code) for each in dis.get_instructions(part))
    for name in sorted({str(each.argval) for each in instructions if each.opname == "IMPORT_NAME"}):
        for full in (name, *(f"{each}.{name}".rstrip(".") for each in above)):
            if full in sys.modules:
                yield full, sys.modules[full]
