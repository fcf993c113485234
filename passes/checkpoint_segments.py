"""Run the intervals of a plan as checkpoint segments: recomputed in backward instead of kept.

Before:
    conv = aten.conv2d.default(x, self.conv.weight)
    bn = aten.batch_norm.default(conv, ..., self.bn.running_mean, self.bn.running_var, True, 0.1, 1e-05, True)
    relu = aten.relu.default(bn)

After:
    (relu,) = run_segment(segment_0, self, x, random=False)

The graph keeps its nodes; ``meta["segment"]`` of one in segment 1 inside segment 0 is (0, 1), ``meta["random"]`` says
that a node draws random numbers, and ``meta["run_once"]`` what must not happen again in recomputation: ``"skip"`` for a
counter nobody reads, or the attributes of the running statistics, which recomputation writes into scratch memory.
``meta["keep"]`` numbers a node that does not run again with its segment, ``meta["statistics"]`` a batch normalization
that only applies its statistics again. Of nodes in compiled code, ``meta["draw"]`` marks one whose few random numbers
stay, ``meta["settled"]`` one whose gradient is summed up as far as it goes before an earlier segment runs backward,
``meta["in_turn"]`` a product that is through with what it reads before the gradient of that is used, which is at this
place in its arguments, and the weight after it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memrewrite.costs.compiled import feeds_products
from memrewrite.costs.normalizations import keeps_statistics
from memrewrite.observe.effects import Effects
from memrewrite.plan.segments import Plan
from memrewrite.plan_facts.chain import compute_nodes, is_counter, own_bytes, reach
from memrewrite.records.errors import InternalError
from memrewrite.records.options import format_bytes
from memrewrite.rewriting.contract import Findings, Result

aten = torch.ops.aten
MARKS = ("segment", "random", "run_once", "keep", "statistics", "draw", "settled", "in_turn")
_FEW = 2**20  # bytes of random numbers that compiled code keeps
_VALUE_AT: dict[Any, int] = {aten.linear.default: 0, aten.matmul.default: 0, aten.mm.default: 0, aten.addmm.default: 1}


@dataclass(frozen=True)
class CheckpointSegments:
    """Mark the nodes of each interval of ``plan``. Raises ``InternalError`` for an interval that may not move.

    ``statistics`` says that those of batch normalizations stay, ``compiled`` that what can be kept is what
    ``torch.compile`` can keep, ``in_turn`` that it is to hold fewer tensors and fuse less.
    """

    plan: Plan
    statistics: bool = False
    compiled: bool = False
    in_turn: bool = False
    name: ClassVar[str] = "checkpoint_segments"
    exact: ClassVar[bool] = True

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Mark the segments; marks from before are taken away first."""
        findings = Findings()
        nodes = compute_nodes(effects)
        clear(graph_module)
        ends = reach(effects, nodes)
        for path, (a, b) in self.plan.numbered():
            if b > ends[a]:
                raise InternalError(
                    f"The plan recomputes {nodes[a].name}..{nodes[b - 1].name}, which may not run twice."
                )
            for number, node in enumerate(nodes[a:b], a):
                _mark(node, path, effects)
                if self._keeps_statistics(node, effects):
                    node.meta["statistics"] = number
                else:
                    _mark_once(node, effects)
                if self.compiled and _draws_few(node, effects):
                    node.meta["draw"] = True
            freed = sum(effects.storages[key].bytes for key in _freed(effects, nodes[a:b]))
            findings.apply(nodes[a], f"{b - a} nodes up to {nodes[b - 1].name}, {format_bytes(freed)} not kept")
        for a, b in self.plan.keeping:
            for number in range(a, b):
                if own_bytes(effects, nodes[number], self.compiled) >= 0:
                    nodes[number].meta["keep"] = number
        for node in nodes if self.compiled else ():
            node.meta["settled"] = True
            if self.in_turn and _narrows(node):
                node.meta["in_turn"] = _VALUE_AT[node.target]
        return findings.result()

    def _keeps_statistics(self, node: fx.Node, effects: Effects) -> bool:
        """Compiled code would rather keep a result that products read."""
        keeps = self.statistics and keeps_statistics(node)
        return keeps and not (self.compiled and feeds_products(node, effects))


def clear(graph_module: fx.GraphModule) -> None:
    """Take every segment mark off the graph."""
    for node in graph_module.graph.nodes:
        for key in MARKS:
            node.meta.pop(key, None)


def _mark(node: fx.Node, path: tuple[int, ...], effects: Effects) -> None:
    node.meta["segment"] = path
    node.meta["random"] = effects.of[node].random


def _draws_few(node: fx.Node, effects: Effects) -> bool:
    made = sum(effects.storages[key].bytes for key in effects.of[node].outputs)
    return effects.of[node].random and node.op == "call_function" and made <= _FEW


def _narrows(node: fx.Node) -> bool:
    """Whether it is a product with a weight that gives less than it reads, and alone reads."""
    first = _VALUE_AT.get(node.target)
    value, weight = (None, None) if first is None else node.args[first : first + 2]
    if not (isinstance(value, fx.Node) and isinstance(weight, fx.Node) and weight.op == "get_attr"):
        return False
    return len(value.users) == 1 and bool(value.meta["val"].numel() > node.meta["val"].numel())


def _mark_once(node: fx.Node, effects: Effects) -> None:
    facts = effects.of[node]
    if is_counter(effects, node):
        node.meta["run_once"] = "skip"
    elif facts.statistics:
        attributes = (n for n in node.all_input_nodes if n.op == "get_attr")
        node.meta["run_once"] = tuple(n for n in attributes if effects.of[n].outputs & facts.statistics)


def _freed(effects: Effects, nodes: list[fx.Node]) -> set[int]:
    """What autograd would keep of these nodes and now does not: all they make, but what is used after them."""
    inside = set(nodes)
    made = {
        key for n in nodes for key in effects.of[n].saved if effects.order[effects.storages[key].producer] in inside
    }
    out = {key for n in nodes if any(user not in inside for user in n.users) for key in effects.of[n].outputs}
    return {key for key in made if effects.storages[key].origin == "node"} - out
