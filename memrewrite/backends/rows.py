"""Gradients of embeddings whose weight something else reads, too: their rows are added to its gradient in place.

A weight that is both embedding and head gets two gradients of its size, which are added where backward ends. In a joint
graph that sum is one node, which lies where the first of them lay, and in the graph of backward a write.
"""

import torch
from torch import Tensor, fx

from memrewrite.runtime import tied_embedding
from memrewrite.torch_internals.operators import OpOverload
from memrewrite.torch_internals.partitioning import is_tangent, is_view, number


def sum_in_place(joint: fx.GraphModule) -> None:
    """Make each sum of a gradient of backward and one of an embedding a node that adds rows to the former."""
    made = _made_in_backward(joint.graph)
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        rows, total = node.args
        if not _is_gradient(rows):
            rows, total = total, rows
        if node.kwargs or not _is_gradient(rows) or total not in made or not _fits(rows, total):
            continue
        of_rows, indices, _, padding_idx = rows.args
        with joint.graph.inserting_before(node):
            new = joint.graph.call_function(tied_embedding.ADDED, (total, of_rows, indices, padding_idx))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        joint.graph.erase_node(node)
        joint.graph.erase_node(rows)


def written(backward: fx.GraphModule) -> fx.GraphModule:
    """The graph of backward, in which such nodes write what they are given, where nothing else reads that by now."""
    for node in backward.graph.find_nodes(op="call_function", target=tied_embedding.ADDED):
        if len(node.args[0].users) > 1:
            continue
        with backward.graph.inserting_before(node):
            backward.graph.call_function(tied_embedding.ADD, node.args).meta = {**node.meta, "val": None}
        node.replace_all_uses_with(node.args[0])
        backward.graph.erase_node(node)
    backward.recompile()
    return backward


def _made_in_backward(graph: fx.Graph) -> set[fx.Node]:
    """What is made of gradients and lies in memory of its own."""
    of_tangents: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or of_tangents & {*node.all_input_nodes}:
            of_tangents.add(node)
    return {node for node in of_tangents if isinstance(node.target, OpOverload) and not is_view(node)}


def _is_gradient(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is tied_embedding.GRADIENT and len(node.users) == 1


def _fits(rows: fx.Node, total: fx.Node) -> bool:
    """Whether ``total`` is read here alone, is of the same type, and has more rows than there are words."""
    mine, other, indices = rows.meta["val"], total.meta["val"], rows.args[1]
    assert isinstance(indices, fx.Node)  # noqa: S101  (as its operator says)
    few = number(indices.meta["val"].numel()) < number(mine.shape[0])
    same = isinstance(other, Tensor) and mine.dtype == other.dtype and mine.shape == other.shape
    return few and same and len(total.users) == 1
