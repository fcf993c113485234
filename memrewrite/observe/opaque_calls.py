"""The calls of a graph that nobody looks into, also where they stand in the body of a region."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from memrewrite.records.function_call import FunctionCall
from memrewrite.records.kernel_launch import KernelLaunch
from memrewrite.torch_internals.operators import name_of_others


def is_opaque(node: fx.Node) -> bool:
    """Whether a node is such a call, or a region that makes one."""
    if node.op == "call_module" or isinstance(node.target, FunctionCall | KernelLaunch) or name_of_others(node.target):
        return True
    return any(map(is_opaque, _inside(node)))


def names_of_calls(graph: fx.Graph) -> set[str]:
    """The names of the operators that others registered, and of the Triton kernels that are launched."""
    found = set[str]()
    for node in graph.nodes:
        found |= {name_of_others(node.target)}
        if isinstance(node.target, KernelLaunch):
            found.add(f"the Triton kernel {node.target.__name__}")
        for body in _bodies(node):
            found |= names_of_calls(body.graph)
    return found - {""}


def _inside(node: fx.Node) -> Iterator[fx.Node]:
    for body in _bodies(node):
        yield from body.graph.nodes


def _bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs that a node of higher order runs."""
    sources = node.all_input_nodes if node.op == "call_function" else ()
    return (body for body in map(body_of, sources) if body is not None)


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node stands for, which is an attribute of its own graph's module; None for other nodes."""
    if node.op != "get_attr":
        return None
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, fx.GraphModule) else None
