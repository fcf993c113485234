"""Whose code a function, class or module is: PyTorch's and the like, an installed library's, or the user's own."""

import functools
import hashlib
import os
import pathlib
import sys
import types
from typing import Any

_VERSIONED = {"builtins", "torch", "torchgen", "functorch", "memrewrite", "numpy", "triton"} | sys.stdlib_module_names
_INSTALLED = {"site-packages", "dist-packages"}


def module_of(value: Any) -> str:
    """The name of the module that a function, class or module is of."""
    if isinstance(value, types.FunctionType):  # a decorator may have given it another's name
        return str(value.__globals__.get("__name__"))
    return value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", None))


def is_foreign(value: Any) -> bool:
    """Whether it is of code that no version in the environment tells."""
    return _top(module_of(value)) not in _VERSIONED


def library_of(value: Any) -> str:
    """The installed package that it is of, "" for the user's own code."""
    top = _top(module_of(value))
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top if is_foreign(value) and _INSTALLED & {*pathlib.PurePath(file).parts} else ""


@functools.cache
def stamp(package: str) -> str:
    """A digest of the sizes and times of an installed package's files: another one once it is edited or replaced."""
    module = sys.modules.get(package)
    folders = [*getattr(module, "__path__", ())]
    files = [file for folder in folders for file in _files(folder)] or [getattr(module, "__file__", None) or ""]
    facts = ((file, os.stat(file)) for file in sorted(files) if os.path.isfile(file))
    text = " ".join(f"{file} {found.st_size} {found.st_mtime_ns}" for file, found in facts)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _files(folder: str) -> list[str]:
    code = (".py", ".so", ".pyd")
    return [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(code)]


def _top(module: str) -> str:
    return module.partition(".")[0]
