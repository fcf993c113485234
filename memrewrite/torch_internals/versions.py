"""Which PyTorch versions memrewrite was tested with, and what is said of the others.

Private API can go with any version. A name that is gone is a sentence before anything ran; a version that is newer than
any tested is one warning, because most of them keep all that is needed.
"""

import contextlib
import operator
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from memrewrite.records.errors import TorchVersionError

OLDEST, NEWEST = (2, 11), (2, 15)
"""The range of minor versions that ``.ci/versions`` tests, both ends included."""


@contextlib.contextmanager
def private_imports() -> Iterator[None]:
    """Imports of private names; raises ``TorchVersionError`` for one that this PyTorch lacks."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        name = getattr(error, "name", None)
        missing = re.search(r"cannot import name '(\w+)'", str(error))
        raise _gone(f"{name}.{missing[1]}" if missing else str(name or error)) from error


def require(*names: str) -> None:
    """Raise ``TorchVersionError`` for the first of these names under ``torch`` that this PyTorch lacks."""
    for name in names:
        try:
            operator.attrgetter(name)(torch)
        except AttributeError as error:
            raise _gone(f"torch.{name}") from error


def require_module(name: str) -> None:
    """Raise ``TorchVersionError`` where this PyTorch lacks a module, which is not imported before it is used."""
    try:
        found = find_spec(name)
    except ModuleNotFoundError:  # not even what it would be in
        found = None
    if found is None:
        raise _gone(name)


def warn_if_untested(version: str) -> None:
    """Warn where ``version`` is newer than any that was tested; nothing else changes."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) > NEWEST:
        warnings.warn(
            f"memrewrite is tested with PyTorch {_tested()}, and this is {version}; if anything fails, "
            "install one of these or a newer memrewrite.",
            stacklevel=2,
        )


def _gone(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"PyTorch {torch.__version__} has no {name}, which memrewrite cannot do without; "
        f"install PyTorch {_tested()}, or a newer memrewrite."
    )


def _tested() -> str:
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
