"""Calls in a graph that looks into none of them: custom ``autograd.Function`` classes, and submodules that are kept.

Tracing would follow a Function's forward and lose its backward. So meanwhile each stands for one operator, which the
tracer notes as one node; afterwards the node becomes the call that the model made. What that does is then observed like
what any node does. For submodules see ``kept_calls``.

    x = aten.linear.default(inputs, self.weight)
    sign = Sign.apply(x, 2.0)
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from memrewrite.capture.expressions import is_literal
from memrewrite.records.errors import CaptureError, InternalError
from memrewrite.records.function_call import FunctionCall
from memrewrite.simulate.fake.stand_ins import functions_on_fakes
from memrewrite.torch_internals.custom_functions import Context, Forward, forwards_replaced
from memrewrite.torch_internals.pytrees import tree_flatten, tree_unflatten

_NAME = "memrewrite::opaque"
torch.library.define(_NAME, "(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")


Way = tuple[tuple[str, Any], ...]
"""Steps that lead into a result: to the ``"item"`` or ``"attribute"`` of that name."""
_STEPS: dict[str, Any] = {"item": operator.getitem, "attribute": getattr}


BEHIND = "memrewrite_behind"
"""The attribute of a stand-in's class that has the submodule that it stands in for."""


def behind(module: nn.Module) -> nn.Module:
    """The module itself, or the one that it stands in for."""
    found: nn.Module = getattr(type(module), BEHIND, module)
    return found


class Traced(ABC):
    """One call while a graph is traced, as an operator is. ``ways`` lead from what it returned to each tensor in that.

    The last argument of the operator is its number.
    """

    ways: list[Way]
    varying: tuple[type, ...] = (torch.SymInt,)
    """What varies with sizes, of which the operator is told."""

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self._leaves, self._tree = tree_flatten(args)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.sizes = [leaf for leaf in self._leaves if isinstance(leaf, self.varying)]

    def args(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> Any:
        """Its arguments with these for their tensors and their sizes that vary."""
        given, numbers = iter(tensors), iter(sizes)
        leaves = [
            next(given) if isinstance(leaf, Tensor) else next(numbers) if isinstance(leaf, self.varying) else leaf
            for leaf in self._leaves
        ]
        return tree_unflatten(leaves, self._tree)

    def given(self, node: fx.Node) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tensors and sizes that the operator is given."""
        tensors, sizes, _ = node.args
        return tensors, sizes  # type: ignore[return-value]

    @abstractmethod
    def node(self, graph: fx.Graph, tensors: Sequence[Any], sizes: Sequence[Any]) -> fx.Node:
        """The call as a node."""


class Returning(Traced):
    """A call that gives something."""

    varying = (torch.SymInt, torch.SymFloat)

    @property
    def fractions(self) -> list[torch.SymFloat]:
        """Those among what varies."""
        return [each for each in self.sizes if isinstance(each, torch.SymFloat)]

    def told(self) -> tuple[list[Tensor], list[Any]]:
        """Tensors and sizes for the operator: a fraction is a tensor of it there, as no operator has lists of these."""
        made = [torch.ops.aten.scalar_tensor.default(each, dtype=torch.float64) for each in self.fractions]
        return [*self.tensors, *made], [each for each in self.sizes if isinstance(each, torch.SymInt)]

    def taken(self, tensors: Sequence[Any], sizes: Sequence[Any], fractions: Iterable[Any]) -> tuple[Any, Any]:
        """Its own tensors and sizes among those of the operator, with these for the fractions."""
        whole, parts = iter(sizes), iter(fractions)
        varying = [next(parts) if isinstance(each, torch.SymFloat) else next(whole) for each in self.sizes]
        return tensors[: len(self.tensors)], varying

    def given(self, node: fx.Node) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tensors, sizes and fractions that the operator is given."""
        tensors, sizes = super().given(node)
        return self.taken(tensors, sizes, [each.args[0] for each in tensors[len(self.tensors) :]])

    @abstractmethod
    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """The tensors that it returns, on fake ones."""

    @abstractmethod
    def returned(self, tensors: Iterator[Tensor]) -> Any:
        """What it returned, with these for its tensors."""


class _Applied(Returning):
    """One application of a Function; ``result`` is what it returned on fake tensors."""

    def __init__(self, kind: type, forward: Forward, args: tuple[Any, ...]) -> None:
        super().__init__(f"custom autograd.Function {kind.__name__}", args)
        self._kind, self._forward = kind, forward
        self.result: Any = None

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        args = self.args(tensors, sizes)
        self.result = self._forward(Context(args), *args)
        several = isinstance(self.result, tuple)
        found = [(i, leaf) for i, leaf in enumerate(self._results) if isinstance(leaf, Tensor)]
        self.ways = [(("item", i),) if several else () for i, _ in found]
        return [leaf for _, leaf in found]

    @property
    def _results(self) -> tuple[Any, ...]:
        return self.result if isinstance(self.result, tuple) else (self.result,)

    def returned(self, tensors: Iterator[Tensor]) -> Any:
        results = tuple(next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self._results)
        return results if isinstance(self.result, tuple) else results[0]

    def node(self, graph: fx.Graph, tensors: Sequence[Any], sizes: Sequence[Any]) -> fx.Node:
        node = graph.call_function(FunctionCall(self._kind), self.args(tensors, sizes))
        map_aggregate(node.args, self._spelled)
        return node

    def _spelled(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node) or is_literal(leaf):
            return leaf
        raise CaptureError(
            f"The {self.name} is given a {type(leaf).__name__}, which no graph can hold; apply it in a submodule that "
            "does little else, which stays a call."
        )


class Opaque:
    """The calls that nobody looks into while one graph is traced."""

    def __init__(self) -> None:
        self.traced: list[Traced] = []

    def __call__(self, kind: type, forward: Forward, context: Any, args: tuple[Any, ...]) -> Any:
        """What takes the place of a Function's forward."""
        return self.called(_Applied(kind, forward, args))

    def called(self, call: Returning) -> Any:
        """What a call returns, as an operator of the graph."""
        return call.returned(iter(torch.ops.memrewrite.opaque(*call.told(), self.number_of(call))))

    def number_of(self, call: Traced) -> int:
        """The number of a call that is now traced."""
        self.traced.append(call)
        return len(self.traced) - 1

    def settle(self, graphs: Sequence[fx.Graph]) -> None:
        """Make every node of the operator the call it stands for; raises ``CaptureError`` where one is not there."""
        operators = (torch.ops.memrewrite.opaque.default, torch.ops.memrewrite.launch.default)
        found = [node for graph in graphs for node in graph.nodes if node.target in operators]
        numbers = {_number(node) for node in found}
        for number in range(min(numbers, default=0), len(self.traced)):  # those before may be of an earlier attempt
            if number not in numbers:
                raise CaptureError(f"What the {self.traced[number].name} gives is not used, and a graph drops it.")
        for node in found:
            self._settle(node, of_a_region=node.graph is not graphs[0])

    def _settle(self, node: fx.Node, of_a_region: bool) -> None:
        call = self.traced[_number(node)]
        given = call.given(node)
        with node.graph.inserting_before(node):
            made = call.node(node.graph, *given)
        if set(made.all_input_nodes) != {each for part in given for each in part if isinstance(each, fx.Node)}:
            raise CaptureError(f"The {call.name} is given tensors in something else than lists and dictionaries.")
        if of_a_region and made.op == "call_module":
            raise CaptureError(f"{call.name} is called in a region of its own, without gradients or under autocast.")
        made.meta = {**node.meta, **made.meta}
        for pick in list(node.users):
            value = made
            for kind, name in call.ways[_picked(pick)]:
                with node.graph.inserting_before(pick):
                    value = node.graph.call_function(_STEPS[kind], (value, name))
                value.meta = dict(pick.meta)
            pick.replace_all_uses_with(value)
            node.graph.erase_node(pick)
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for tensor in {*inputs} - {*made.all_input_nodes}:  # of fractions
            node.graph.erase_node(tensor)


def _number(node: fx.Node) -> int:
    return int(node.args[-1])  # type: ignore[arg-type]


def _picked(node: fx.Node) -> int:
    return int(node.args[1])  # type: ignore[arg-type]


_TRACING: ContextVar[Opaque | None] = ContextVar("_TRACING", default=None)


def traced_now() -> Opaque | None:
    """The calls of the graph that is being traced, if one is."""
    return _TRACING.get()


@torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator]
def _on_fakes(tensors: list[Tensor], sizes: list[Any], number: int) -> list[Tensor]:
    tracing = _TRACING.get()
    if tracing is None:
        raise InternalError("A call that nobody looks into ran as an operator outside of tracing.")
    call = tracing.traced[number]
    if not isinstance(call, Returning):
        raise InternalError(f"{call.name} gives nothing.")
    with torch.no_grad():
        return call.run(*call.taken(tensors, sizes, call.fractions))


@contextmanager
def opaque(kinds: Sequence[type]) -> Iterator[Opaque]:
    """Let these Functions be traced as calls; ``settle`` of what this gives is for the graph that was made."""
    calls = Opaque()
    token = _TRACING.set(calls)
    try:
        with functions_on_fakes(), forwards_replaced(kinds, calls):
            yield calls
    finally:
        _TRACING.reset(token)
