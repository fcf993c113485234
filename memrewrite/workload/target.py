"""From the text TARGET to a model and its example inputs.

TARGET is ``path/model.py[:attr]`` or ``package.module:attr``, split on the last colon. ``attr`` (dots allowed) is a
module, a class or factory without required arguments, or a callable returning ``(module, example_inputs)``. Without
``attr``: ``get_model``, ``build_model``, ``model``, then the only ``nn.Module`` subclass that the file defines itself.

Example inputs are ``--input``, else ``get_inputs`` / ``example_inputs`` in the file (a value, or a function that may
take ``batch_size``), else the second item of the pair. Loading a target runs its code with the user's rights.
"""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from memrewrite.process.child import TargetFolder
from memrewrite.records.errors import MemrewriteError, TargetError, first_line
from memrewrite.records.ranges import parse_ranges
from memrewrite.workload import inputs as example
from memrewrite.workload.place import Source
from memrewrite.workload.ranges import enlarged
from memrewrite.workload.step import Inputs

MODEL_NAMES = ("get_model", "build_model", "model")
INPUT_NAMES = ("get_inputs", "example_inputs")


@dataclass(frozen=True)
class Loaded:
    """A model ready for a step: the module, its inputs (both on the CPU unless the file moved them) and a short name.

    ``folder`` is where the target's imports are looked up; a process that unpickles the module needs it on its path.
    """

    module: nn.Module
    inputs: Inputs
    name: str
    folder: Path


def load(
    target: str, inputs: tuple[str, ...] = (), batch_size: int | None = None, dynamic: tuple[str, ...] = ()
) -> Loaded:
    """Import TARGET, make its model and its example inputs; ``inputs`` are ``--input`` texts.

    ``batch_size`` is passed to a ``get_inputs`` that takes it; other inputs are repeated or cut along dimension 0. Then
    they are brought to the largest sizes of the ranges in ``dynamic``.
    Raises ``TargetError`` when there is no model, several, or no inputs, and ``UsageError`` for a wrong input text.
    """
    source = Source.parse(target)
    with importable(source.folder), _as_script(source.place):
        code = _import_file(source.file) if source.file else _import_module(source)
        attribute = source.attribute or _find(code, source)
        module, second = _make(_attribute(code, attribute, source), source.at(attribute))
        if inputs:
            found, sized = example.from_texts(inputs, module), False
        else:
            found, sized = _inputs(code, module, second, source, attribute, batch_size)
    if batch_size is not None and not sized:
        found = example.with_batch_size(found, batch_size)
    found, _ = enlarged(module, found, parse_ranges(dynamic))
    name = attribute if source.file is None else f"{source.file.name}:{attribute}"
    return Loaded(module, found, name, source.folder)


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Put ``folder`` first on ``sys.path``, as ``python model.py`` does, and take it off again."""
    entry = TargetFolder(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the target's code may have changed the path itself
            sys.path.remove(entry)


@contextlib.contextmanager
def _as_script(place: str) -> Iterator[None]:
    """Let code that reads the command line find one without arguments, as ``python model.py`` has; ours is not its."""
    before, sys.argv = sys.argv, [place]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _foreign(doing: str, file: Path | str | None) -> Iterator[None]:
    """Turn what the target's own code raises into one sentence with its line; memrewrite's errors pass."""
    try:
        yield
    except MemrewriteError:
        raise
    except (Exception, SystemExit) as error:
        line = _line(error, str(file)) if file else None
        where = f"{file}, line {line}" if line else str(file or "The target")
        hint = "fix it there and try again"
        if isinstance(error, ImportError) and "relative import" in str(error):
            hint = _in_package(Path(str(file)))
        elif isinstance(error, SystemExit) and doing == "importing it":
            hint = 'put what exits under if __name__ == "__main__"'
        message = f"{type(error).__name__}: {first_line(error)}"
        raise TargetError(f"{where}: {doing} raised {message}; {hint}.") from error


def _in_package(file: Path) -> str:
    """How a file inside a package is given; the innermost folder without ``__init__.py`` is where that is looked up."""
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        names, folder = [folder.name, *names], folder.parent
    if len(names) == 1:
        return "a file inside a package is given as package.module:attr"
    return f"give {'.'.join(names)}:attr, with {folder} as the current folder or on PYTHONPATH"


def _line(error: BaseException, file: str) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def _import_file(file: Path) -> ModuleType:
    name = _free_name(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TargetError(f"{file} is not a Python file; give path/model.py[:attr] or package.module:attr.")
    code = importlib.util.module_from_spec(spec)
    sys.modules[name] = code
    try:
        with _foreign("importing it", file):
            spec.loader.exec_module(code)
    except BaseException:
        del sys.modules[name]
        raise
    return code


def _free_name(file: Path) -> str:
    """The file's stem, so that pickle and imports find it again; with a digest where it would hide another module."""
    stem = re.sub(r"\W", "_", file.stem)
    taken: str | None = None
    if stem in sys.modules:
        taken = getattr(sys.modules[stem], "__file__", None) or stem
    elif spec := importlib.util.find_spec(stem):
        taken = spec.origin  # None for a folder without __init__.py, which a file of the same name outranks
    free = stem not in sys.stdlib_module_names and (taken is None or Path(taken).resolve() == file)
    return stem if free else f"{stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def _import_module(source: Source) -> ModuleType:
    try:
        with _foreign("importing it", _module_file(source.place)):
            return importlib.import_module(source.place)
    except TargetError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{source.place}.".startswith(f"{missing.name}."):
            places = f"{source.folder} or the installed packages"
            raise TargetError(f"No module {source.place!r} can be imported from {places}; check it.") from missing
        raise


def _module_file(name: str) -> str | None:
    """The file of a module, None where it has none or looking for it, which imports its package, fails as it will."""
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit):
        return None
    return spec.origin if spec else None


def _find(code: ModuleType, source: Source) -> str:
    """The attribute to take when none is named; raises ``TargetError`` unless exactly one answer is sure."""
    values = vars(code)
    for name in MODEL_NAMES:
        if isinstance(values.get(name), nn.Module) or callable(values.get(name)):
            return name
    classes = {
        value: name for name, value in values.items() if _is_module_class(value) and value.__module__ == code.__name__
    }
    if len(classes) == 1:
        return next(iter(classes.values()))
    lines = [f"  {source.at(name)}{_needs(value)}" for value, name in classes.items()]
    if lines:
        raise TargetError(
            "\n".join([f"{source.place} defines {len(lines)} nn.Module subclasses; name the one to take:", *lines])
        )
    instances = [f"  {source.at(name)}" for name, value in values.items() if isinstance(value, nn.Module)]
    if instances:
        raise TargetError(
            "\n".join([f"{source.place} holds models under other names; name the one to take:", *instances])
        )
    raise TargetError(
        f"{source.place} defines no get_model, build_model, model or nn.Module subclass; add one of them."
    )


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _attribute(code: ModuleType, attribute: str, source: Source) -> Any:
    value: Any = code
    for name in attribute.split("."):
        if not hasattr(value, name):
            public = [known for known in dir(value) if not known.startswith("_")]
            close = difflib.get_close_matches(name, public, n=3)
            hint = f"did you mean {' or '.join(source.at(known) for known in close)}?" if close else "check the name."
            raise TargetError(f"{source.place} has no {attribute!r}; {hint}")
        value = getattr(value, name)
    return value


def _make(value: Any, where: str) -> tuple[nn.Module, Any]:
    """The module that ``value`` is or makes, and the second item of its pair (None without one)."""
    if callable(value) and not isinstance(value, nn.Module):
        if needs := _needs(value):
            hint = f"def get_model(): return {where.rpartition(':')[2]}(...)"
            raise TargetError(f"{where}{needs}; add a function without arguments that returns it: {hint}.")
        with _foreign(f"calling {where}", _file_of(value)):
            value = value()
    second = None
    if isinstance(value, tuple) and len(value) == 2:
        value, second = value
    if not isinstance(value, nn.Module):
        raise TargetError(
            f"{where} gives an object of type {type(value).__name__}, not a torch.nn.Module or a pair (module, "
            "example_inputs)."
        )
    return value, second


def _needs(value: Any) -> str:
    """`` needs the arguments a, b`` for a callable with required arguments, else nothing."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature; calling tells
        return ""
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return f" needs the argument{'s' * (len(required) > 1)} {', '.join(required)}" if required else ""


def _file_of(value: Any) -> str | None:
    try:
        return inspect.getsourcefile(value)
    except TypeError:
        return None


def _inputs(
    code: ModuleType, module: nn.Module, second: Any, source: Source, attribute: str, batch_size: int | None
) -> tuple[Inputs, bool]:
    """The example inputs in the target's code, and whether they have the batch size already."""
    name = next((name for name in INPUT_NAMES if hasattr(code, name)), None)
    if name is None and second is None:
        hint = f"add get_inputs() to it, or say for example {example.suggestion(module)}"
        raise TargetError(f"{source.place} gives no example inputs; {hint}")
    value, sized = (second, False) if name is None else _call_inputs(getattr(code, name), source.at(name), batch_size)
    return example.normalise(value, source.at(name or attribute)), sized


def _call_inputs(value: Any, where: str, batch_size: int | None) -> tuple[Any, bool]:
    if not callable(value):
        return value, False
    sized = batch_size is not None and "batch_size" in inspect.signature(value).parameters
    if (needs := _needs(value)) and not (sized and needs.endswith(" the argument batch_size")):
        raise TargetError(f"{where}{needs}; give batch_size by --batch-size and every other argument a default.")
    with _foreign(f"calling {where}", _file_of(value)):
        return (value(batch_size=batch_size) if sized else value()), sized
