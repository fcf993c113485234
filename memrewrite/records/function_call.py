"""A call in a graph that nobody looks into: a custom ``autograd.Function`` with the backward it comes with."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FunctionCall:
    """The target of a node that applies the Function ``kind``."""

    kind: Any

    def __call__(self, *args: Any) -> Any:
        """Apply it."""
        return self.kind.apply(*args)

    @property
    def __name__(self) -> str:
        return str(self.kind.__name__)

    @property
    def __module__(self) -> str:  # type: ignore[override]
        return str(self.kind.__module__)
