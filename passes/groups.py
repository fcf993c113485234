"""Nodes of a graph that one call is to compute, and how that call comes to stand in their place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem
from typing import Self

import torch
from torch import fx, nn

from memrewrite.observe.effects import Effects
from memrewrite.passes.matching import CONTEXTS, erase, inherit
from memrewrite.passes.spelling import CASTS, operation
from memrewrite.records.graph_calls import ChainCall, GraphCall
from memrewrite.runtime.segment import as_autocast
from memrewrite.runtime.swish import exact_swish, swish
from memrewrite.torch_internals.pytrees import tensors_in

Copy = Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], fx.Node]
"""Copies a node into a graph, given the copies of those before."""


def as_it_is(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The copy that does what the node does."""
    return graph.node_copy(node, copies.__getitem__)


@dataclass(frozen=True)
class Group:
    """Nodes in the order they run."""

    effects: Effects
    members: tuple[fx.Node, ...]

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What they read that is not among them."""
        read = dict.fromkeys(given for node in self.members for given in node.all_input_nodes)
        return tuple(node for node in read if node not in self.members)

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Those that others read."""
        return tuple(node for node in self.members if any(user not in self.members for user in node.users))

    def without(self, nodes: set[fx.Node]) -> Self:
        """The group of the others."""
        return replace(self, members=tuple(member for member in self.members if member not in nodes))


def bytes_of(node: fx.Node) -> int:
    """The bytes of what a node gives."""
    return sum(value.nbytes for value in tensors_in(node.meta["val"]))


def computes_each_number(node: fx.Node) -> bool:
    """Whether a node makes each number of its result of those at the same place in what it is given."""
    name = operation(node)
    packet = getattr(torch.ops.aten, name, None) if name else None
    if name in CASTS or packet is None:
        return name in CASTS
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def is_pointwise(node: fx.Node) -> bool:
    """The same of what passes put into a graph, too."""
    if isinstance(node.target, ChainCall):
        inside = (each for each in node.target.graph.graph.nodes if each.op not in ("placeholder", "output"))
        return all(map(computes_each_number, inside))
    return computes_each_number(node) or node.target in (swish, exact_swish, as_autocast)


def is_trained(effects: Effects) -> bool:
    """Whether anything that is computed has a gradient; in inference nothing has."""
    made = (node.meta.get("val") for node in effects.order if node.op.startswith("call"))
    return any(tensor.requires_grad for value in made for tensor in tensors_in(value))


def obstacle(group: Group, trained: bool = True) -> str | None:
    """Why the nodes cannot run at once, None if they can; what is ``trained`` has gradients."""
    effects, position = group.effects, group.effects.position
    for node in group.outputs:
        facts, value = effects.of[node], node.meta["val"]
        if facts.outputs & facts.reads:
            return f"Its result {node.name} is a view of what it is made of, and is read elsewhere."
        if trained and not value.requires_grad:
            return f"Its result {node.name} has no gradient."
    place = max(position[node] for node in group.inputs)
    users = (user for node in group.outputs for user in node.users if user not in group.members)
    if early := next((user for user in users if position[user] <= place), None):
        return f"{early.name} reads one of its results before all of what it reads is there."
    first, last = position[group.members[0]], position[group.members[-1]]
    for node in effects.order[first : max(last, place) + 1]:
        if operation(node) in CONTEXTS:
            return f"A no_grad or autocast region begins or ends inside of it (at {node.name})."
    read = {key for node in (*group.inputs, *group.members) for key in effects.of[node].outputs}
    for node in effects.order[first:]:
        if effects.of[node].writes & read:
            return f"{node.name} writes one of its tensors later."
    return None


def put(
    graph: fx.Graph,
    group: Group,
    target: Callable[[fx.GraphModule], GraphCall],
    replaced: dict[fx.Node, fx.Node],
    copy: Copy = as_it_is,
) -> dict[fx.Node, fx.Node]:
    """Put one call after all that the group reads, and erase the nodes; gives what now stands for which of them.

    ``target`` makes the call of the graph of the members, ``replaced`` says what stands for those of groups before.
    """
    given = tuple(replaced.get(node, node) for node in group.inputs)
    with graph.inserting_after(max(given)):
        new = graph.call_function(target(_graph_of(group, given, copy)), given)
    results = {group.outputs[0]: new}
    if len(group.outputs) > 1:
        new.meta = {key: value for key, value in group.members[-1].meta.items() if key != "val"}
        with graph.inserting_after(new):
            results = {node: graph.call_function(getitem, (new, i)) for i, node in enumerate(group.outputs)}
    for node, result in results.items():
        inherit(result, node)
    erase(reversed(group.members))
    return results


def _graph_of(group: Group, given: tuple[fx.Node, ...], copy: Copy) -> fx.GraphModule:
    """The members as a function of what is given; spelled alike for equal groups, so that these compile once."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"x{i}") for i, node in enumerate(given)}
    for node in group.members:
        copies[node] = copy(graph, node, copies)
        copies[node].name, copies[node].meta = f"y{len(copies)}", {}
    results = tuple(copies[node] for node in group.outputs)
    graph.output(results if len(results) > 1 else results[0])
    return fx.GraphModule(nn.Module(), graph)
