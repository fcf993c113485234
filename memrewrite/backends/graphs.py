"""A planned order as the two graphs that are compiled."""

from torch import fx
from torch.fx.node import map_arg

from memrewrite.backends.facts import Facts
from memrewrite.backends.plan import Order
from memrewrite.torch_internals.partitioning import Divided, modules


def graphs(
    joint: fx.GraphModule, divided: Divided, facts: Facts, order: Order, outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward; what runs again is written into the joint graph first, each copy before its reader.

    Nothing else of the joint graph changes, so that what PyTorch knows of it stays.
    """
    following = _following(joint, facts, order)
    stand: list[fx.Node] = []  # what stands at each place of the order
    for place, item in enumerate(order.items):
        node = facts.nodes[item.node]
        now = [stand[where] if where >= 0 else facts.nodes[-1 - where] for where in item.reads]
        made = {facts.nodes[i]: each for i, each in zip(facts.inputs[item.node], now, strict=True)}
        if item.region is None:
            node.args, node.kwargs = map_arg(node.args, made.__getitem__), map_arg(node.kwargs, made.__getitem__)
            stand.append(node)
            continue
        with joint.graph.inserting_before(following[place]):
            copy = joint.graph.node_copy(node, made.__getitem__)
        copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
        stand.append(copy)
    joint.recompile()
    return modules(joint, [facts.nodes[i] for i in handed(facts, order)], outputs, divided.static)


def handed(facts: Facts, order: Order) -> list[int]:
    """What forward hands to backward: what is saved, and the inputs of the graph and sizes that backward reads."""
    read = {-1 - where for item in order.items for where in item.reads if where < 0}
    known = {i for i in read | {*facts.gradients} if i in facts.given or i in facts.symbols}
    return sorted(order.saved | {i for i in known if facts.nodes[i].op != "get_attr"})


def _following(joint: fx.GraphModule, facts: Facts, order: Order) -> list[fx.Node]:
    """For each place of the order, the next node of backward itself at that place or after it."""
    (node,) = joint.graph.find_nodes(op="output")
    found = []
    for item in reversed(order.items):
        if item.region is None:
            node = facts.nodes[item.node]
        found.append(node)
    return found[::-1]
