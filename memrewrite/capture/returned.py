"""What a program returns: all that the model does, or its loss alone, or the rest as it is read.

A language model returns its logits beside its loss, the largest tensor of its step, and few loops look at them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture.captured import Captured, InputSpec, TensorSpec
from memrewrite.capture.normal import attribute
from memrewrite.observe.effects import Effects
from memrewrite.records.errors import UsageError
from memrewrite.records.graph_calls import LazyCall
from memrewrite.runtime.cross_entropy import too_few
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.torch_internals.tracing import module_of
from memrewrite.workload.step import autocast

_NO_LOSS = (
    "returns='loss' is for models that return their loss, as .loss, ['loss'], or where loss_fn finds it; "
    "here loss_fn computes it of what the model returns. Leave it out, compute the loss in forward, or, where it is "
    "the cross-entropy of logits, give returns='lazy'."
)
_NEITHER = (
    "returns='lazy' is for models that return their loss, as .loss, ['loss'], or where loss_fn finds it, or logits "
    "that the pass linear_cross_entropy may make some rows of at a time (not with exact=True); this one returns "
    "neither. Leave it out, or compute the loss in forward."
)
_IN_ROWS = ", and what its loss computes row by row makes some rows of it at a time"
_FEW = "returns='lazy' has no effect: what its loss is made of is too small to be made some rows at a time."
_NOTHING_LAZY = (
    "returns='lazy' has no effect: nothing that is returned beside the loss is made of weights and one smaller value."
)


StepsTo = Callable[[fx.Node], tuple[fx.Node, fx.Node, fx.Node | None, tuple[tuple[Any, ...], ...]] | None]
"""What is known of logits: what they are the product of, with which weight and bias, and what is done to them."""


def loss_alone(captured: Captured, loss_of: Callable[[Any], Tensor]) -> Captured:
    """The capture without what the model returns beside the loss that ``loss_of`` finds in it: None is in its place.

    Its graph is changed.
    Raises ``UsageError`` where the loss is none of the tensors that the model returns.
    """
    graph_module = captured.graph_module
    (output,) = graph_module.graph.find_nodes(op="output")
    leaves: Any = output.args[0]
    if (place := _place(captured, leaves, loss_of)) is None:
        raise UsageError(_NO_LOSS)
    returned = leaves[: captured.results]
    dropped = [i for i, leaf in enumerate(returned) if isinstance(leaf, fx.Node) and i != place]
    if not dropped:
        return captured
    output.args = (tuple(None if i in dropped else leaf for i, leaf in enumerate(leaves)),)
    graph_module.recompile()
    sizes = (leaves[i].meta.get("val") for i in dropped)
    shapes = ", ".join(f"{tuple(map(int, size.shape))}" for size in sizes if isinstance(size, Tensor))
    note = f"Returns its loss alone; None is in the place of {len(dropped)} more ({shapes})."
    return replace(captured, returns="loss", notes=(*captured.notes, note))


def lazily(
    captured: Captured, loss_of: Callable[[Any], Tensor], look: Callable[[], Effects], steps_to: StepsTo
) -> Captured:
    """The capture with what the model returns beside its loss made as it is read, where that is larger than its source.

    Its graph is changed: it has the source in the place of the output. ``look`` observes the graph. By what
    ``steps_to`` says of logits the loss may be made of them some rows at a time: then the weights are there, too.
    Raises ``UsageError`` where the loss is none of the tensors that the model returns, nor made of such logits.
    """
    graph_module = captured.graph_module
    (output,) = graph_module.graph.find_nodes(op="output")
    leaves: Any = output.args[0]
    place = _place(captured, leaves, loss_of)
    effects = look()
    calls: dict[int, LazyCall] = {}
    sources: dict[int, fx.Node] = {}
    returned = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)}
    for number, leaf in returned.items():
        others = {key for i, other in returned.items() if i != number for key in effects.of[other].outputs}
        spare = number != place and number < captured.results and not effects.of[leaf].outputs & others
        source = _source_of(leaf, effects) if spare else None
        if source is not None and (sizes := _sizes(leaf, source, captured.inputs)) is not None:
            calls[number], sources[number] = _call(graph_module, source, leaf, sizes, steps_to), source
    if place is None and all(call.in_rows is None for call in calls.values()):
        raise UsageError(_NEITHER)
    if place is None:
        few = [i for i, call in calls.items() if call.in_rows is None or too_few(leaves[i].meta["val"].numel())]
        calls = {i: call for i, call in calls.items() if i not in few}
    if not calls:
        return replace(captured, notes=(*captured.notes, _NOTHING_LAZY if place is not None else _FEW))
    kept: dict[int, Any] = {number: sources[number] for number in calls}
    if place is None:
        weights = {str(node.target): node for node in graph_module.graph.find_nodes(op="get_attr")}
        kept = {number: (kept[number], *map(weights.__getitem__, call.paths)) for number, call in calls.items()}
    output.args = (tuple(kept.get(number, leaf) for number, leaf in enumerate(leaves)),)
    _erase_unread(graph_module.graph, [leaves[number] for number in calls], effects)
    graph_module.recompile()
    shapes = ", ".join(str(tuple(leaves[number].meta["val"].shape)) for number in calls)
    in_rows = _IN_ROWS if place is None else ""
    note = f"Of what it returns, {shapes} is made when it is read; until then what it is made of is kept{in_rows}."
    return replace(captured, returns="lazy", lazy=calls, loss_in_rows=place is None, notes=(*captured.notes, note))


def note_sizes(graph: fx.Graph) -> None:
    """Keep the sizes that were captured, those that vary by name: once nodes are observed they have the example's."""
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            node.meta[_SIZES] = tuple(size if isinstance(size, int) else str(size) for size in value.shape)


_SIZES = "captured_sizes"  # in a node's meta, which graphs copy with the node


def _sizes(node: fx.Node, source: fx.Node, inputs: InputSpec) -> tuple[int, ...] | None:
    """Those of ``node``, -1 for that of the first dimension of ``source``, -2 for that of its second, and so on.

    None where they are not known.
    """
    vary = any(isinstance(size, str) for leaf in inputs.leaves if isinstance(leaf, TensorSpec) for size in leaf.shape)
    found, given = (each.meta.get(_SIZES, () if vary else tuple(each.meta["val"].shape)) for each in (node, source))
    known = len(found) == node.meta["val"].dim() and all(isinstance(size, int) or size in given for size in found)
    return tuple(size if isinstance(size, int) else -1 - given.index(size) for size in found) if known else None


def _erase_unread(graph: fx.Graph, nodes: Sequence[fx.Node], effects: Effects) -> None:
    """Erase those of the nodes that nothing reads, and what only they read, of what does the same whenever it runs."""
    for node in nodes:
        if not node.users and (node.op == "get_attr" or _runs_again(node, effects)):
            inputs = node.all_input_nodes
            graph.erase_node(node)
            _erase_unread(graph, inputs, effects)


def _source_of(leaf: fx.Node, effects: Effects) -> fx.Node | None:
    """The smallest value, smaller than an output, that it is made of by what does the same whenever it runs.

    Beside that value it is made of weights alone, and it is no view of it. None where there is no such value.
    """
    least = leaf.meta["val"].nbytes if isinstance(leaf.meta["val"], Tensor) else 0
    found = None
    node: fx.Node | None = leaf
    while node is not None and _runs_again(node, effects):
        sources = [each for each in node.all_input_nodes if not _of_weights(each, effects)]
        node = sources[0] if len(sources) == 1 and sources[0].op != "placeholder" else None
        apart = node is not None and not effects.of[node].outputs & effects.of[leaf].outputs
        if node is not None and apart and _stays(node, effects) and node.meta["val"].nbytes < least:
            found, least = node, node.meta["val"].nbytes
    return found


def _runs_again(node: fx.Node, effects: Effects) -> bool:
    """Whether it is an operation that does the same whenever it runs, on tensors that nothing writes."""
    facts = effects.of[node]
    called = node.op in ("call_function", "call_method") and facts.repeats
    return called and _stays(node, effects) and not (facts.random or facts.opaque or facts.writes)


def _stays(node: fx.Node, effects: Effects) -> bool:
    return isinstance(node.meta["val"], Tensor) and not effects.of[node].outputs & effects.written


def _of_weights(node: fx.Node, effects: Effects) -> bool:
    """Whether it is a weight that nothing writes, or made of such alone."""
    if node.op == "get_attr":
        return _stays(node, effects)
    inputs = node.all_input_nodes
    return bool(inputs) and _runs_again(node, effects) and all(_of_weights(each, effects) for each in inputs)


def _call(
    graph_module: fx.GraphModule, source: fx.Node, leaf: fx.Node, sizes: tuple[int, ...], steps_to: StepsTo
) -> LazyCall:
    """What makes ``leaf`` of its source."""
    needed = {leaf}
    for node in reversed(graph_module.graph.nodes):
        if node in needed and node is not source:
            needed.update(node.all_input_nodes)
    nodes = [node for node in graph_module.graph.nodes if node in needed and node is not source]
    attributes = [node for node in nodes if node.op == "get_attr"]
    hidden, weight, bias, steps = steps_to(leaf) or (None, None, None, None)
    head = [node for node in (weight, bias) if node is not None]
    in_rows = hidden is source and {*head} == {*attributes}
    attributes = head if in_rows else attributes
    graph = fx.Graph()
    copies = {each: graph.placeholder(each.name) for each in (source, *attributes)}
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[leaf])
    module = module_of(nn.Module(), graph, type(graph_module).__name__)
    paths = tuple(str(each.target) for each in attributes)
    weights = [attribute(graph_module, path) for path in paths]
    asked: list[tuple[torch.dtype | None, torch.dtype]] = [(None, source.meta["val"].dtype)]
    asked += [(amp, dtype) for amp in (torch.bfloat16, torch.float16) for dtype in dict.fromkeys((asked[0][1], amp))]
    found = (_type(module, source.meta["val"], weights, *each) for each in asked)
    types = tuple(each for each in found if each is not None)
    return LazyCall(module, sizes, types, paths, (steps, 0, False) if steps is not None and in_rows else None)


def _type(
    module: fx.GraphModule, source: Tensor, weights: list[Tensor], amp: torch.dtype | None, dtype: torch.dtype
) -> tuple[torch.dtype | None, torch.dtype, torch.dtype] | None:
    """Of which type the result is under autocast to ``amp``, where the source is of type ``dtype``.

    None where it cannot be made then.
    """
    on = FakeTensorMode(allow_non_fake_inputs=True)
    with on, torch.no_grad(), autocast(amp, source.device.type), suppress(RuntimeError):
        given = torch.empty(source.shape, dtype=dtype, device=source.device)
        return amp, dtype, module(given, *map(on.from_tensor, weights)).dtype
    return None


def _place(captured: Captured, leaves: Sequence[Any], loss_of: Callable[[Any], Tensor]) -> int | None:
    """Which of what the model returns is its loss: where that is one number, this, whatever is done with it."""
    only = leaves[0].meta.get("val") if captured.results == 1 and isinstance(leaves[0], fx.Node) else None
    if isinstance(only, Tensor) and only.dim() == 0:
        return 0
    marks = [_like(leaf) for leaf in leaves]
    try:
        found = loss_of(captured.returned(marks))
    except Exception:  # whatever a function says of other numbers than it is for
        return None
    return next((i for i, mark in enumerate(marks) if mark is found), None)


def _like(leaf: Any) -> Tensor:
    """A tensor of its shape, without memory unless it is one number: a cache looks at what it is made of again."""
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
    if isinstance(value, Tensor) and value.dim() > 0:
        return torch.empty([*map(int, value.shape)], device="meta")
    return torch.zeros((), device="cpu")
