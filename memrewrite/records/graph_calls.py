"""Calls in a graph that compute a graph of other calls, in a way of their own."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from memrewrite.runtime.fused import fused
from memrewrite.runtime.lazy_output import InRows, Types, lazy_output
from memrewrite.runtime.segment import OWN
from memrewrite.runtime.tiles import in_pieces, in_tiles


@dataclass(frozen=True)
class GraphCall:
    """The target of a node that computes ``graph``, whose placeholders are the arguments that the node has.

    ``operation`` computes it, given a function that does, the ``options`` and the arguments.
    """

    graph: fx.GraphModule
    operation: ClassVar[Callable[..., Any]]

    @property
    def options(self) -> tuple[Any, ...]:
        """What ``operation`` is told besides: all further fields, in their order."""
        return tuple(getattr(self, each.name) for each in fields(self) if each.name != "graph")

    def __call__(self, *given: Any) -> Any:
        """Compute it."""
        return type(self).operation(self._function, *self.options, *given)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        def function(*given: Any) -> Any:
            return self.graph(*given)

        function.__name__ = self.__name__
        vars(function)["calls_a_graph"] = True
        return function

    @cached_property
    def __name__(self) -> str:
        """The same for all that compute the same."""
        return f"chain_{hashlib.sha256(self.graph.code.encode()).hexdigest()[:12]}"

    @property
    def __module__(self) -> str:  # type: ignore[override]
        return __name__


@dataclass(frozen=True)
class ChainCall(GraphCall):
    """A chain of operations at once.

    Those of its arguments that ``trained`` counts need a gradient, and for that backward needs those that ``keeps``
    counts.
    """

    trained: tuple[int, ...]
    keeps: tuple[int, ...]
    operation: ClassVar[Callable[..., Any]] = fused


@dataclass(frozen=True)
class TiledCall(GraphCall):
    """A token-wise part, ``rows`` rows at a time of the arguments that ``in_rows`` counts.

    Those that ``weights`` counts are read by products alone.
    """

    in_rows: tuple[int, ...]
    weights: tuple[int, ...]
    rows: int
    operation: ClassVar[Callable[..., Any]] = in_tiles


@dataclass(frozen=True)
class PiecedCall(GraphCall):
    """A part in about ``pieces`` along the dimension ``dim`` of the arguments that ``apart`` counts."""

    apart: tuple[int, ...]
    dim: int
    pieces: int
    operation: ClassVar[Callable[..., Any]] = in_pieces


class _Quiet(nn.Module):
    """Stands for the drop-in that has an output."""

    promise: ClassVar[SimpleNamespace] = SimpleNamespace(name="the model", tell_of_output=lambda *_: None)


setattr(_Quiet, OWN, _Quiet)


@dataclass(frozen=True)
class LazyCall(GraphCall):
    """What makes an output when it is read, of a value and the tensors at ``paths``; no node has it as its target.

    ``sizes``, ``types`` and ``in_rows`` are those of ``lazy_output``.
    """

    sizes: tuple[int, ...]
    types: Types
    paths: tuple[str, ...]
    in_rows: InRows | None
    operation: ClassVar[Callable[..., Any]] = lazy_output

    def of_rows(self, rows: int, fused: bool) -> "LazyCall":
        """The same, of whose rows losses are made so many at a time, or fused."""
        return self if self.in_rows is None else replace(self, in_rows=(self.in_rows[0], rows, fused))

    def output(self, *of: Tensor) -> Tensor:
        """The output of a value and those tensors, of a module that tells nobody when it is made."""
        return lazy_output(_Quiet(), self._function, *self.options, *of)
