"""Steps of several graphs that a process settled, noted for the next one in Inductor's cache, where the graphs are.

What each graph was told of the others as it was last compiled tells the next process to ask for that at once, so that
all come from the cache. Without it they would be divided for a first step again, which no cache has.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memrewrite.backends.choices import InStep
from memrewrite.targets import transients
from memrewrite.torch_internals import fusions, kernel_order, partitioning, realized, written_over
from memrewrite.torch_internals.compiling import digest, note, noted
from memrewrite.version import __version__


@dataclass(frozen=True)
class KnownPart:
    """A graph: what it was told as it was compiled, with how many bytes ``more`` at later calls of it, and
    ``before_loss``.

    ``usual`` is the peak of the step with PyTorch's own plans. Where it stayed as it was first compiled, ``choice`` and
    ``peak`` are those of the settled step.
    """

    in_step: InStep | None
    more: int
    before_loss: int | None
    usual: int | None
    choice: str = ""
    peak: int = 0


@dataclass(frozen=True)
class KnownStep:
    """A step by the keys of its ``calls``, and what is told to graphs that are compiled after it."""

    told: InStep
    calls: tuple[str, ...]
    parts: Mapping[str, KnownPart]

    def keep(self, name: str) -> None:
        """Note it by ``name``, which has all that it depends on."""
        note(name, json.dumps(asdict(self)))

    @staticmethod
    def drop(name: str) -> None:
        """What was noted by ``name`` is not so."""
        note(name)

    @classmethod
    def find(cls, name: str) -> "KnownStep | None":
        """What was noted by a name; None where nothing was, or where it was damaged."""
        try:
            found = json.loads(noted(name) or "")
            parts = {key: _part(**each) for key, each in found["parts"].items()}
            return cls(InStep(**found["told"]), tuple(found["calls"]), parts)
        except (ValueError, KeyError, TypeError):
            return None


def _part(in_step: Mapping[str, Any] | None, **rest: Any) -> KnownPart:
    return KnownPart(None if in_step is None else InStep(**in_step), **rest)


def made_by() -> str:
    """The version and the code that divides graphs, as a part of what things are named by in caches."""
    others = (partitioning, transients, realized, written_over, fusions, kernel_order)
    return f"memrewrite {__version__} {digest(Path(__file__).parent, *(Path(str(each.__file__)) for each in others))}"
