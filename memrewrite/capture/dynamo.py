"""The second front end: Dynamo, through a ``torch.compile`` backend that only looks.

It keeps what export loses (custom autograd Functions, ``no_grad`` and ``autocast`` regions) and refuses loudly what it
cannot trace. Its graph is at the level of torch functions with parameters as inputs; sizes are fixed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture.captured import Captured
from memrewrite.capture.normal import bind, constants, quiet, rebuild
from memrewrite.errors import CaptureError
from memrewrite.private import tree_flatten, tree_leaves, tree_map
from memrewrite.step import Inputs


def capture(model: nn.Module, inputs: Inputs) -> Captured:
    """Capture through Dynamo. Nothing is computed: the backend hands out markers, which show where outputs go."""
    spec, order = bind(model, inputs)
    mine = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, inputs.__dict__)
    backend = _Lookout()
    torch.compiler.reset()
    try:
        with quiet():
            compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
            output = compiled(*mine["args"], **mine["kwargs"])
    finally:
        torch.compiler.reset()
    if backend.graph_module is None:
        raise CaptureError(f"{type(model).__name__} computes nothing with tensors: there is no graph to capture.")
    results, tree = tree_flatten(output)
    leaves = tree_leaves((mine["args"], mine["kwargs"]))
    tensors = [leaves[i] for i in order if isinstance(leaves[i], Tensor)]
    paths = {id(t): path for path, t in [*model.named_parameters(), *model.named_buffers()]}
    given = dict(zip(backend.graph_module.graph.find_nodes(op="placeholder"), backend.example, strict=True))
    inputs_made: dict[int, fx.Node] = {}

    def replace(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
        if not inputs_made:
            inputs_made.update({id(t): graph.placeholder(f"input_{i}") for i, t in enumerate(tensors)})
        if node.op != "placeholder":
            return False
        value = given[node]
        if id(value) in inputs_made:
            values[node] = inputs_made[id(value)]
        elif id(value) in paths:
            values[node] = graph.get_attr(paths[id(value)])
        else:
            name = type(model).__name__
            raise CaptureError(f"The graph of {name} takes {node.name}, which is no input or parameter.")
        return True

    def outputs(arguments: Any) -> list[Any]:
        nodes = {id(marker): node for marker, node in zip(backend.markers, arguments, strict=True)}
        return [nodes.get(id(leaf), leaf) for leaf in results]

    root = _root(backend.graph_module, model)
    module = rebuild(backend.graph_module.graph, root, model, replace, outputs)
    return Captured(
        graph_module=module,
        inputs=spec,
        output_tree=tree,
        constants=constants(module, model),
        training={path: child.training for path, child in model.named_modules()},
        front_end="dynamo",
    )


class _Lookout:
    """A compile backend that keeps the graph and gives empty markers in place of results."""

    def __init__(self) -> None:
        self.graph_module: fx.GraphModule | None = None
        self.example: list[Any] = []
        self.markers: list[Tensor] = []

    def __call__(self, graph_module: fx.GraphModule, example: list[Any]) -> Callable[..., list[Tensor]]:
        self.graph_module, self.example = graph_module, example
        (output,) = graph_module.graph.find_nodes(op="output")
        self.markers = [torch.empty(0) for _ in output.args[0]]
        return lambda *args: self.markers


def _root(graph_module: fx.GraphModule, model: nn.Module) -> nn.Module:
    """The model's attributes and, beside them, the graph's own (constants, bodies of higher-order operators)."""
    root = nn.Module()
    root.__dict__.update({k: v for k, v in model.__dict__.items() if k in ("_parameters", "_buffers", "_modules")})
    for name in ("_parameters", "_buffers", "_modules"):
        root.__dict__[name] = {**graph_module.__dict__[name], **root.__dict__[name]}
    return root
