"""A planned order as the two graphs that are compiled."""

from bisect import bisect_right

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from memrewrite.backends.divisions import divisions
from memrewrite.backends.facts import Facts, with_fewer_rows
from memrewrite.backends.plan import Order, Planner
from memrewrite.backends.scratch import make_fewer_rows
from memrewrite.runtime.compiled import SETTLE
from memrewrite.torch_internals.fusions import SCRATCH
from memrewrite.torch_internals.partitioning import Divided, modules
from memrewrite.torch_internals.realized import realized

_PARTS = 32  # of backward that settle, at most


def graphs(
    joint: fx.GraphModule,
    divided: Divided,
    facts: Facts,
    order: Order,
    outputs: int,
    apart: bool,
    share: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward; what runs again is written into the joint graph first, each copy before its reader.

    Nothing else of the joint graph changes, so that what PyTorch knows of it stays; but for ``apart``, with which
    backward settles what it has made in many places, for what of it is ``stored``, and for losses, which make so many
    times fewer rows at once as ``share`` says.
    """
    for node, taken in zip(facts.nodes, with_fewer_rows(facts, share).scratch, strict=True):
        if taken:
            node.meta[SCRATCH] = taken
    settled = settles(facts, order) if apart else {}
    following = _following(joint, facts, order)
    stand: list[fx.Node] = []  # what stands at each place of the order
    for place, item in enumerate(order.items):
        node = facts.nodes[item.node]
        if place in settled:
            args = tuple([stand[where] for where in places] for places in settled[place])
            with joint.graph.inserting_before(following[place]):
                joint.graph.call_function(SETTLE, args).meta = {"partitioner_tag": "is_backward", "val": None}
        now = [stand[where] if where >= 0 else facts.nodes[-1 - where] for where in item.reads]
        made = {facts.nodes[i]: each for i, each in zip(facts.inputs[item.node], now, strict=True)}
        if item.region is None:
            node.args, node.kwargs = map_arg(node.args, made.__getitem__), map_arg(node.kwargs, made.__getitem__)
            stand.append(realized(node) if item.node in facts.stored else node)
            continue
        with joint.graph.inserting_before(following[place]):
            copy = _copied(joint.graph, node, made)
        copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
        stand.append(realized(copy) if item.node in facts.stored else copy)
    make_fewer_rows(joint.graph, share)
    joint.recompile()
    return modules(joint, [facts.nodes[i] for i in handed(facts, order)], outputs, divided.static)


def _copied(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """A node again, of what is ``made`` for it.

    It is named without the number of the first, for which PyTorch 2.11 tries all numbers from 1 on until one is free:
    with thousands of copies that took seconds.
    """
    args, kwargs = map_arg(node.args, made.__getitem__), map_arg(node.kwargs, made.__getitem__)
    name = node.name.rstrip("_0123456789") or node.name
    return graph.create_node(node.op, node.target, args, kwargs, name, node.type)


def settles(facts: Facts, order: Order) -> dict[int, tuple[list[int], list[int]]]:
    """The places of the order before which backward settles, with those of what is read later and of new gradients.

    Inductor fuses reductions for gradients of layers that lie far apart, and holds all that they read until then. Where
    few bytes cross, what crosses is said to be written once the gradients before it are there, so that neither these
    nor what they read waits.
    """
    cuts = max((each for each in divisions(facts) if len(each) < _PARTS), key=len)
    planner = Planner(facts)
    part = {i: bisect_right(cuts, latest) for i, latest in zip(planner.backward, planner.latest, strict=True)}
    read_last = {where: place for place, item in enumerate(order.items) for where in item.reads}
    made: list[int] = []
    new: list[int] = []
    found = {}
    for place, item in enumerate(order.items):
        if item.region is not None or not isinstance(facts.nodes[item.node].meta.get("val"), Tensor):
            continue
        if made and part[item.node] != part[order.items[made[-1]].node]:
            crossing = [each for each in made if read_last.get(each, -1) >= place]
            if crossing and new:
                found[place] = (crossing, new)
            new = []
        made += [] if item.node in facts.views else [place]
        new += [place] if item.node in facts.gradients else []
    return found


def handed(facts: Facts, order: Order) -> list[int]:
    """What forward hands to backward: what is saved, and the inputs of the graph and sizes that backward reads."""
    read = {*facts.gradients, *(-1 - where for item in order.items for where in item.reads if where < 0)}
    symbols = set().union(*(_whole(facts, i) for i in read if i in facts.symbols))
    given = {i for i in read if i in facts.given and facts.nodes[i].op != "get_attr"}
    return sorted(order.saved | symbols | given)


def _whole(facts: Facts, symbol: int) -> set[int]:
    """The numbers that one is made of in backward: of a fraction, which Inductor's caches do not take, whole ones."""
    if isinstance(facts.nodes[symbol].meta["val"], torch.SymInt) or not facts.symbols.issuperset(facts.inputs[symbol]):
        return {symbol}
    return set().union(*(_whole(facts, i) for i in facts.inputs[symbol]))


def _following(joint: fx.GraphModule, facts: Facts, order: Order) -> list[fx.Node]:
    """For each place of the order, the next node of backward itself at that place or after it."""
    (node,) = joint.graph.find_nodes(op="output")
    found = []
    for item in reversed(order.items):
        if item.region is None:
            node = facts.nodes[item.node]
        found.append(node)
    return found[::-1]
