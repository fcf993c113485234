"""Launches of Triton kernels while a graph is traced: each becomes a node that launches the kernel as the model did.

    empty_like = aten.empty_like.default(x)
    launch(_kernel, (n // 1024,), x, empty_like, n, BLOCK=1024)

The grid is what it depends on: a function of what the kernel is tuned to is asked for each choice that there is. Values
that no program can spell are found again by their names in modules.
"""

import operator
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from memrewrite.capture.expressions import literal, named
from memrewrite.capture.opaque import Opaque, Traced
from memrewrite.records.errors import CaptureError
from memrewrite.records.kernel_launch import KernelLaunch, Named
from memrewrite.simulate.fake.launches import grid_for, is_of_fakes, launched_on_fakes, parted
from memrewrite.torch_internals.pytrees import tree_map
from memrewrite.torch_internals.tracing import notes_operators
from memrewrite.torch_internals.triton_kernels import Launch, launches_replaced


@contextmanager
def launches_traced(calls: Opaque) -> Iterator[None]:
    """Let the launches of what is traced be among the ``calls`` of its graph."""

    def traced(launch: Launch) -> bool:
        if not (is_of_fakes(launch) and notes_operators()):
            return launched_on_fakes(launch)
        call = _Launched(launch)
        torch.ops.memrewrite.launch(call.written, call.read, call.sizes, calls.number_of(call))
        return True

    with launches_replaced(traced):
        yield


class _Launched(Traced):
    """A launch; the tensors that it writes and those that it reads are told apart only while it is traced."""

    varying = (torch.SymInt, torch.SymFloat, torch.SymBool)

    def __init__(self, launch: Launch) -> None:
        name = f"Triton kernel {launch.function.__name__}"
        self._target = KernelLaunch(_kernel_named(launch))
        spelled = tree_map(lambda leaf: _spelled(name, leaf), (_grid(launch), launch.args, launch.kwargs))
        super().__init__(name, spelled)
        self.ways = []
        self.written, self.read = parted(launch)

    def given(self, node: fx.Node) -> tuple[Sequence[Any], Sequence[Any]]:
        written, read, sizes, _ = node.args
        nodes = dict(zip(map(id, (*self.written, *self.read)), (*written, *read), strict=True))  # type: ignore[misc]
        return [nodes[id(tensor)] for tensor in self.tensors], sizes  # type: ignore[return-value]

    def node(self, graph: fx.Graph, tensors: Sequence[Any], sizes: Sequence[Any]) -> fx.Node:
        grid, args, kwargs = self.args(tensors, sizes)
        return graph.create_node("call_function", self._target, (grid, *args), kwargs, name="launch")


def _kernel_named(launch: Launch) -> Named:
    function = launch.function
    if (found := _named(launch.kernel, function.__module__, function.__qualname__)) is None:
        raise CaptureError(
            f"The Triton kernel {function.__name__} is launched, which {function.__module__} has under no name of its "
            "own, so that no program can launch it; define it at the top of a module."
        )
    return found


def _named(value: Any, module: str, path: str) -> Named | None:
    """Where a value is found: by this path in this module, or by another name there or in another one."""
    if (found := named(value, module, path)) is not None:
        return found
    modules = {module: sys.modules.get(module), **sys.modules}
    spaces = [(name, vars(each)) for name, each in modules.items() if isinstance(each, types.ModuleType)]
    return next((Named(m, n) for m, space in spaces for n, each in [*space.items()] if each is value), None)


def _grid(launch: Launch) -> Any:
    """The grid, or what may be chosen, each with the grid for that."""
    found = [(chosen, tuple(map(_count, grid_for(launch, arguments)))) for chosen, arguments in launch.variants()]
    return found if len({str(grid) for _, grid in found}) > 1 else found[0][1]


def _count(value: Any) -> Any:
    return value if isinstance(value, torch.SymInt) else operator.index(value)


def _spelled(name: str, leaf: Any) -> Any:
    """An argument as a graph can hold it; raises ``CaptureError`` for one that no program can spell."""
    if isinstance(leaf, (torch.Tensor, *_Launched.varying)):
        return leaf
    value = leaf.value if type(leaf).__name__ == "constexpr" else leaf
    try:
        literal(value)
    except CaptureError:
        module = "triton.language" if type(value).__name__ == "dtype" else getattr(value, "__module__", "")
        function = getattr(value, "fn", value)
        found = _named(value, module, getattr(function, "__qualname__", "") or str(value))
        if found is None:
            raise CaptureError(
                f"The {name} is given {value!r}, a {type(value).__name__}, which no program can spell; give it "
                "tensors, numbers, text, or what a module has under a name of its own."
            ) from None
        return found
    return value
