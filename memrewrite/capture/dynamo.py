"""The second front end: Dynamo, through a ``torch.compile`` backend that only looks.

It keeps what export loses (custom autograd Functions, ``no_grad`` and ``autocast`` regions) and refuses loudly what it
cannot trace. Its graph is at the level of torch functions with parameters as inputs; sizes are fixed.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture.captured import Captured
from memrewrite.capture.normal import bind, constants, copy_into, quiet, rebuild
from memrewrite.errors import CaptureError
from memrewrite.private import tree_flatten, tree_leaves, tree_map
from memrewrite.step import Inputs


def capture(model: nn.Module, inputs: Inputs) -> Captured:
    """Capture through Dynamo. Nothing is computed: the backend hands out markers, which show where outputs go.

    Changes that forward makes to attributes are made with markers, too: the caller has to put attributes back.
    """
    spec, order = bind(model, inputs)
    mine = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, inputs.__dict__)
    owned = _Owned(model)
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
    given = dict(zip(backend.graph_module.graph.find_nodes(op="placeholder"), backend.example, strict=True))
    known: dict[int, fx.Node] = {}
    owned.add(backend.graph_module)

    def replace(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
        if not known:
            known.update({id(t): graph.placeholder(f"input_{i}") for i, t in enumerate(tensors)})
        if node.op == "placeholder":
            values[node] = known.get(id(given[node])) or owned.node(graph, given[node])
        elif node.target is _CHECKPOINT:  # the plan decides what is recomputed
            body = backend.graph_module.get_submodule(str(node.args[0].target))
            inner = dict(zip(body.graph.find_nodes(op="placeholder"), (values[n] for n in node.args[1:]), strict=True))
            values[node] = copy_into(graph, body.graph, inner, replace)
        elif node.target is operator.getitem and isinstance(values.get(node.args[0]), tuple):
            values[node] = values[node.args[0]][node.args[1]]
        return node in values

    def outputs(graph: fx.Graph, computed: Any) -> list[Any]:
        nodes = {**known, **{id(marker): node for marker, node in zip(backend.markers, computed, strict=True)}}
        return [
            leaf if not isinstance(leaf, Tensor) else nodes.get(id(leaf)) or owned.node(graph, leaf)
            for leaf in results
        ]

    module = rebuild(backend.graph_module.graph, owned.root, model, replace, outputs)
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


class _Owned:
    """The tensors a graph reaches as attributes: the model's own and, under names of their own, all others."""

    def __init__(self, model: nn.Module) -> None:
        self.root = nn.Module()
        self.root.__dict__.update(model.__dict__)
        for name in _TABLES:
            self.root.__dict__[name] = model.__dict__[name].copy()
        self._paths: dict[int, str] = {}
        for path, child in reversed(list(model.named_modules())):
            tensors = {**vars(child), **child._buffers, **child._parameters}
            owned = {id(t): f"{path}.{name}".lstrip(".") for name, t in tensors.items() if isinstance(t, Tensor)}
            self._paths.update(owned)

    def add(self, graph_module: fx.GraphModule) -> None:
        """Let the root have the graph's own attributes (constants, bodies of higher-order operators), too."""
        for name in _TABLES:
            self.root.__dict__[name] = {**graph_module.__dict__[name], **self.root.__dict__[name]}

    def node(self, graph: fx.Graph, tensor: Tensor) -> fx.Node:
        """A node for an attribute of the model, or for a tensor it keeps elsewhere, which becomes a constant."""
        if id(tensor) not in self._paths:
            self._paths[id(tensor)] = f"captured_{len(self._paths)}"
            self.root.register_buffer(self._paths[id(tensor)], tensor)
        return graph.get_attr(self._paths[id(tensor)])


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_TABLES = ("_parameters", "_buffers", "_modules")
