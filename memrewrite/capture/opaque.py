"""Custom ``autograd.Function`` classes as calls in a graph that looks into none of them.

Tracing would follow a Function's forward and lose its backward. So meanwhile each stands for one operator, which the
tracer notes as one node; afterwards the node becomes the call that the model made. What that does is then observed like
what any node does.

    x = aten.linear.default(inputs, self.weight)
    sign = Sign.apply(x, 2.0)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from memrewrite.records.errors import CaptureError
from memrewrite.records.function_call import FunctionCall
from memrewrite.simulate.fake.stand_ins import functions_on_fakes
from memrewrite.torch_internals.custom_functions import Context, Forward, forwards_replaced
from memrewrite.torch_internals.pytrees import tree_flatten, tree_unflatten

_NAME = "memrewrite::opaque"
torch.library.define(_NAME, "(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")


class _Traced:
    """One application of a Function while a graph is traced; ``result`` is what it returned on fake tensors."""

    def __init__(self, kind: type, forward: Forward, args: tuple[Any, ...]) -> None:
        self.kind, self._forward = kind, forward
        self._leaves, self._tree = tree_flatten(args)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.sizes = [leaf for leaf in self._leaves if isinstance(leaf, torch.SymInt)]
        self.result: Any = None

    def args(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Its arguments with these for their tensors and their sizes that vary."""
        given, numbers = iter(tensors), iter(sizes)
        leaves = [
            next(given) if isinstance(leaf, Tensor) else next(numbers) if isinstance(leaf, torch.SymInt) else leaf
            for leaf in self._leaves
        ]
        args: tuple[Any, ...] = tree_unflatten(leaves, self._tree)
        return args

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """The tensors that forward returns."""
        args = self.args(tensors, sizes)
        self.result = self._forward(Context(args), *args)
        return [leaf for leaf in self.results if isinstance(leaf, Tensor)]

    @property
    def results(self) -> tuple[Any, ...]:
        """What it returned, as several in any case."""
        return self.result if isinstance(self.result, tuple) else (self.result,)


class Opaque:
    """The applications of custom Functions while one graph is traced."""

    def __init__(self) -> None:
        self.traced: list[_Traced] = []

    def __call__(self, kind: type, forward: Forward, context: Any, args: tuple[Any, ...]) -> Any:
        """What takes the place of a Function's forward."""
        call = _Traced(kind, forward, args)
        self.traced.append(call)
        found = iter(torch.ops.memrewrite.opaque(call.tensors, call.sizes, len(self.traced) - 1))
        results = tuple(next(found) if isinstance(leaf, Tensor) else leaf for leaf in call.results)
        return results if isinstance(call.result, tuple) else results[0]

    def settle(self, graphs: Sequence[fx.Graph]) -> None:
        """Make every node of the operator the call it stands for; raises ``CaptureError`` where one is not there."""
        found = [n for graph in graphs for n in graph.nodes if n.target is torch.ops.memrewrite.opaque.default]
        numbers = {_number(node) for node in found}
        for number in range(min(numbers, default=0), len(self.traced)):  # those before may be of an earlier attempt
            if number not in numbers:
                name = self.traced[number].kind.__name__
                raise CaptureError(f"What the custom autograd.Function {name} gives is not used, and a graph drops it.")
        for node in found:
            self._settle(node)

    def _settle(self, node: fx.Node) -> None:
        tensors, sizes, _ = node.args
        call = self.traced[_number(node)]
        with node.graph.inserting_before(node):
            made = node.graph.call_function(FunctionCall(call.kind), call.args(tensors, sizes))  # type: ignore[arg-type]
        if set(made.all_input_nodes) != set(node.all_input_nodes):
            raise CaptureError(
                f"The custom autograd.Function {call.kind.__name__} is applied to tensors in something else than lists "
                "and dictionaries."
            )
        made.meta = dict(node.meta)
        positions = [i for i, leaf in enumerate(call.results) if isinstance(leaf, Tensor)]
        for pick in list(node.users):
            if isinstance(call.result, tuple):
                pick.args = (made, positions[_picked(pick)])
            else:
                pick.replace_all_uses_with(made)
                node.graph.erase_node(pick)
        node.graph.erase_node(node)


def _number(node: fx.Node) -> int:
    return int(node.args[2])  # type: ignore[arg-type]


def _picked(node: fx.Node) -> int:
    return int(node.args[1])  # type: ignore[arg-type]


_TRACING: ContextVar[Opaque] = ContextVar("_TRACING")


@torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator]
def _on_fakes(tensors: list[Tensor], sizes: list[Any], number: int) -> list[Tensor]:
    with torch.no_grad():
        return _TRACING.get().traced[number].run(tensors, sizes)


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
