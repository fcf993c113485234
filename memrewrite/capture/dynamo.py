"""The second front end: Dynamo, through a ``torch.compile`` backend that only looks.

It keeps what export loses (custom autograd Functions, ``no_grad`` and ``autocast`` regions) and refuses loudly what it
cannot trace. Its graph is at the level of torch functions with parameters as inputs; sizes are fixed.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture.assigned import Assignments
from memrewrite.capture.captured import Captured
from memrewrite.capture.held import Held, returning
from memrewrite.capture.normal import bind, constants, copy_into, rebuild
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.differences import joined
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.state.attributes import Attributes
from memrewrite.torch_internals.logs import quiet
from memrewrite.torch_internals.operators import set_grad_enabled
from memrewrite.torch_internals.pytrees import tree_flatten, tree_leaves, tree_map
from memrewrite.torch_internals.tracing import distributions_as_before
from memrewrite.workload.step import Inputs


def capture(model: nn.Module, inputs: Inputs, held: Sequence[Held] = ()) -> Captured:
    """Capture through Dynamo, with what forward leaves in the attributes ``held`` as further outputs.

    Nothing is computed: the backend hands out markers, which show where outputs go.
    """
    spec, order = bind(model, inputs)
    mine = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, vars(inputs.of_a_run()))
    leaves = tree_leaves((mine["args"], mine["kwargs"]))
    owned = _Owned(model)  # before Dynamo runs
    with returning(model, held):
        backend, output, assignments = _run(model, mine)
    results, tree = tree_flatten(output)
    translation = _Translation(backend, owned, [leaves[i] for i in order if isinstance(leaves[i], Tensor)])
    module = rebuild(
        translation.graph_module.graph,
        owned.root_with(translation.graph_module),
        model,
        translation.replace,
        lambda graph, computed: translation.outputs(graph, computed, results),
    )
    _hand_back_grad_mode(module.graph)
    module.recompile()
    captured = Captured(
        graph_module=module,
        inputs=spec,
        output_tree=tree,
        constants=constants(module, model),
        training={path: child.training for path, child in model.named_modules()},
        differentiable=model.training,
        front_end="dynamo",
        held=tuple(held),
    )
    return assignments.added_to(captured)


def _run(model: nn.Module, mine: dict[str, Any]) -> tuple["_Lookout", Any, Assignments]:
    backend, attributes = _Lookout(), Attributes(model)
    torch.compiler.reset()
    try:
        with quiet(), distributions_as_before():
            compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
            output = compiled(*mine["args"], **mine["kwargs"])
            return backend, output, Assignments(model, [*attributes.changed()])
    finally:
        torch.compiler.reset()
        attributes.restore()  # what forward assigns to attributes Dynamo has assigned, with markers


def _hand_back_grad_mode(graph: fx.Graph) -> None:
    """Let regions end in the grad mode forward was called in, where Dynamo wrote down the one it was traced in."""
    switches = [node for node in graph.nodes if node.target is set_grad_enabled]
    if not switches:
        return
    with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
        called_in = graph.call_function(torch.is_grad_enabled)
    modes = [torch.is_grad_enabled()]
    for node in switches:
        if len(modes) > 1 and node.args[0] == modes[-2]:
            modes.pop()
            if len(modes) == 1:
                node.args = (called_in,)
        else:
            modes.append(bool(node.args[0]))


class _Translation:
    """From Dynamo's graph, with parameters as inputs, to one over the model's attributes."""

    def __init__(self, backend: "_Lookout", owned: "_Owned", tensors: list[Tensor]) -> None:
        if backend.graph_module is None:
            raise CaptureError(f"{owned.name} computes nothing with tensors: there is no graph to capture.")
        self.graph_module = backend.graph_module
        self._owned, self._tensors, self._markers = owned, tensors, backend.markers
        placeholders = backend.graph_module.graph.find_nodes(op="placeholder")
        self._given = dict(zip(placeholders, backend.example, strict=True))
        self._inputs: dict[int, fx.Node] = {}

    def replace(self, graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
        if not self._inputs:
            self._inputs = {id(t): graph.placeholder(f"input_{i}") for i, t in enumerate(self._tensors)}
        arguments: tuple[Any, ...] = node.args
        if node.op == "placeholder":
            values[node] = self._node(graph, self._given[node])
        elif node.target is _CHECKPOINT:  # the plan decides what is recomputed
            body: Any = self.graph_module.get_submodule(arguments[0].target)
            inside = dict(zip(body.graph.find_nodes(op="placeholder"), (values[n] for n in arguments[1:]), strict=True))
            values[node] = copy_into(graph, body.graph, inside, self.replace)
        elif getattr(node.target, "__name__", "") == _LAUNCH:
            raise CaptureError(
                f"{self._owned.name} launches a Triton kernel, which Dynamo's graph cannot hand on, and export has no "
                "graph of it; launch it in a custom autograd.Function, which stays a call."
            )
        elif node.target is operator.getitem and isinstance(values.get(arguments[0]), tuple):
            values[node] = values[arguments[0]][arguments[1]]
        return node in values

    def outputs(self, graph: fx.Graph, computed: Any, results: list[Any]) -> list[Any]:
        """What forward returned (markers, inputs, attributes, plain values) as nodes."""
        nodes = {id(marker): node for marker, node in zip(self._markers, computed, strict=True)}
        return [
            leaf if not isinstance(leaf, Tensor) else nodes.get(id(leaf)) or self._node(graph, leaf) for leaf in results
        ]

    def _node(self, graph: fx.Graph, tensor: Tensor) -> fx.Node:
        return self._inputs.get(id(tensor)) or self._owned.node(graph, tensor)


class _Lookout:
    """A compile backend that keeps the graph and gives empty markers in place of results."""

    def __init__(self) -> None:
        self.graph_module: fx.GraphModule | None = None
        self.example: list[Any] = []
        self.markers: list[Tensor] = []

    def __call__(self, graph_module: fx.GraphModule, example: list[Any]) -> Callable[..., list[Tensor]]:
        self.graph_module, self.example = graph_module, example
        (output,) = graph_module.graph.find_nodes(op="output")
        self.markers = [torch.empty(0, device="cpu") for _ in output.args[0]]
        return lambda *args: self.markers


class _Owned:
    """The tensors a graph reaches as attributes: the model's own and, under new names, those in its lists and dicts."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self._root = nn.Module()
        vars(self._root).update(vars(model))
        for name in _TABLES:
            vars(self._root)[name] = vars(model)[name].copy()
        self._elsewhere = {id(t) for t in tensors_of(model)}
        self._paths: dict[int, str] = {}
        for path, child in reversed(list(model.named_modules())):
            tensors = {**vars(child), **child._buffers, **child._parameters}
            owned = {id(t): joined(path, name) for name, t in tensors.items() if isinstance(t, Tensor)}
            self._paths.update(owned)

    def root_with(self, graph_module: fx.GraphModule) -> nn.Module:
        """The model's attributes and, beside them, the graph's own (constants, bodies of higher-order operators)."""
        for name in _TABLES:
            vars(self._root)[name] = {**vars(graph_module)[name], **vars(self._root)[name]}
        return self._root

    def node(self, graph: fx.Graph, tensor: Tensor) -> fx.Node:
        """A node for an attribute of the model, or for a tensor in a list, say, which becomes a constant.

        Raises ``CaptureError`` for any other tensor: it may depend on the inputs (``x.T`` does).
        """
        if id(tensor) not in self._paths:
            if id(tensor) not in self._elsewhere:
                shape = tuple(tensor.shape)
                raise CaptureError(
                    f"The graph of {self.name} uses a tensor {shape} that is no input and not its own; where that lies "
                    "in a cache of keys and values, do without (use_cache=False)."
                )
            self._paths[id(tensor)] = f"captured_{len(self._paths)}"
            self._root.register_buffer(self._paths[id(tensor)], tensor)
        return graph.get_attr(self._paths[id(tensor)])


_LAUNCH = "triton_kernel_wrapper_mutation"  # an operator of higher order, which is there once it is imported
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_TABLES = ("_parameters", "_buffers", "_modules")
