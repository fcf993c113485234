"""The contract of a pass: look at the graph and its observed effects, rewrite what is safe, refuse in words."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import fx

from memrewrite.capture.origin import origin
from memrewrite.observe.effects import Effects


@dataclass(frozen=True)
class Applied:
    """One rewrite that was made: where (module path) and what, in a few words."""

    where: str
    what: str


@dataclass(frozen=True)
class Refused:
    """One candidate that was left alone, with the reason as one sentence."""

    where: str
    reason: str


@dataclass(frozen=True)
class Result:
    """What a pass did to the graph; ``freed`` are the bytes that autograd keeps less of what the graph makes."""

    applied: tuple[Applied, ...] = ()
    refused: tuple[Refused, ...] = ()
    freed: int = 0

    @property
    def modified(self) -> bool:
        """True iff the graph's code changed."""
        return bool(self.applied)


@dataclass
class Findings:
    """Collects what a pass does while it runs; ``result()`` freezes it."""

    applied: list[Applied] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def apply(self, node: fx.Node, what: str) -> None:
        """Record a rewrite made at ``node``."""
        self.applied.append(Applied(str(origin(node)), what))

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Record why the candidate at ``node`` was left alone."""
        self.refused.append(Refused(str(origin(node)), reason))

    def result(self) -> Result:
        """The immutable record."""
        return Result(tuple(self.applied), tuple(self.refused))

    def finish(self, graph_module: fx.GraphModule) -> Result:
        """The immutable record, after the graph was linted and recompiled, if it was changed."""
        if self.applied:
            graph_module.graph.lint()
            graph_module.recompile()
        return self.result()


class Pass(Protocol):
    """A graph pass. ``name`` is its file, its CLI spelling and its test's name.

    ``exact`` says that the rewritten graph computes bit for bit what the original did
    (in-place marking, functionalisation, checkpointing); pattern rewrites that change
    the arithmetic say False and are verified against float64.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite ``graph_module.graph`` in place and say what was done; leave it linted and recompiled."""
        ...
