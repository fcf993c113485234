"""A launch of a Triton kernel in a graph, which looks into it as little as into a custom Function."""

import importlib
import operator
from dataclasses import dataclass
from typing import Any

from memrewrite.runtime.launches import launch


@dataclass(frozen=True)
class Named:
    """A value by where it is found, at ``path`` in a module."""

    module: str
    path: str

    def value(self) -> Any:
        """The value itself."""
        return operator.attrgetter(self.path)(importlib.import_module(self.module))


@dataclass(frozen=True)
class KernelLaunch:
    """The target of a node that launches ``kernel``: its arguments are the grid and those of the kernel."""

    kernel: Named

    def __call__(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Launch it."""
        launch(self.kernel.value(), *map(_found, (grid, *args)), **{name: _found(v) for name, v in kwargs.items()})

    @property
    def __name__(self) -> str:
        return self.kernel.path

    @property
    def __module__(self) -> str:  # type: ignore[override]
        return self.kernel.module


def _found(value: Any) -> Any:
    """The same with values in the place of where they are found."""
    if isinstance(value, tuple | list):
        return type(value)(map(_found, value))
    if isinstance(value, dict):
        return {key: _found(each) for key, each in value.items()}
    return value.value() if isinstance(value, Named) else value
