"""Operators whose values decide how many results there are: a plan needs to know these wherever it runs on no data."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from memrewrite.capture.origin import origin
from memrewrite.records.errors import CaptureError
from memrewrite.simulate.fake.rows import symbolic
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS, FakeTensorMode
from memrewrite.torch_internals.operators import OpOverload


def refuse_sized(graph_module: fx.GraphModule, name: str) -> None:
    """Raise ``CaptureError`` where the values of a constant decide that: only the tracer knows what it holds."""
    graphs = (module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        tags = node.target.tags if isinstance(node.target, OpOverload) else ()
        if torch.Tag.dynamic_output_shape in tags and _is_of_constants(node) and not _runs_without_values(node):
            place = origin(node).line or node.name
            raise CaptureError(
                f"{name} lets the values of a constant decide how many results there are (at {place}), which no plan "
                "can count; compute what is made of it once, when the model is made."
            )


def _is_of_constants(node: fx.Node) -> bool:
    return any(source.op in ("get_attr", "placeholder") for source in _sources(node))


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """All nodes that a node is made of."""
    seen: set[fx.Node] = set()
    left = [*node.all_input_nodes]
    while left:
        source = left.pop()
        if source not in seen:
            seen.add(source)
            left += source.all_input_nodes
            yield source


def _runs_without_values(node: fx.Node) -> bool:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    if any(map(symbolic, values)):
        return True  # as it was traced
    with FakeTensorMode():
        args, kwargs = fx.map_arg((node.args, node.kwargs), _empty)
        try:
            node.target(*args, **kwargs)  # type: ignore[operator]
        except FAKE_TENSOR_ERRORS:
            return False
    return True


def _empty(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
