"""Run the intervals of a plan as checkpoint segments: recomputed in backward instead of kept.

Before:
    conv = aten.conv2d.default(x, self.conv.weight)
    bn = aten.batch_norm.default(conv, ..., self.bn.running_mean, self.bn.running_var, True, 0.1, 1e-05, True)
    relu = aten.relu.default(bn)

After:
    (relu,) = run_segment(segment_0, self, x, random=False)

The graph stays as it is; what is done with each node is said by its mark (``plan.marks``).
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from memrewrite.costs.fused import feeds_products
from memrewrite.costs.normalizations import keeps_statistics
from memrewrite.observe.effects import Effects
from memrewrite.plan.marks import UNMARKED, Marks, NodeMark
from memrewrite.plan.segments import Plan
from memrewrite.plan_facts.chain import barrier, compute_nodes, save_bytes_of
from memrewrite.records.errors import InternalError
from memrewrite.records.options import format_bytes
from memrewrite.rewriting.contract import Findings, Result

aten = torch.ops.aten
_FEW = 2**20  # bytes of random numbers that compiled code keeps
_VALUE_AT: dict[Any, int] = {aten.linear.default: 0, aten.matmul.default: 0, aten.mm.default: 0, aten.addmm.default: 1}


@dataclass(frozen=True)
class CheckpointSegments:
    """Mark the nodes of each interval of ``plan``. Raises ``InternalError`` for an interval that may not move.

    ``statistics`` says that those of batch normalizations stay, ``on_demand`` that nodes run again one by one, as
    compiled code has them, ``in_turn`` that this is to hold fewer tensors and fuse less.
    """

    plan: Plan
    statistics: bool = False
    on_demand: bool = False
    in_turn: bool = False
    name: ClassVar[str] = "checkpoint_segments"
    exact: ClassVar[bool] = True

    def __call__(self, effects: Effects) -> tuple[Marks, Result]:
        """The marks of the graph's nodes, and what that does."""
        findings = Findings()
        nodes = compute_nodes(effects)
        marks: dict[fx.Node, NodeMark] = {}
        ends = barrier(effects, nodes)
        for path, (a, b) in self.plan.numbered():
            if b > ends[a]:
                raise InternalError(
                    f"The plan recomputes {nodes[a].name}..{nodes[b - 1].name}, which may not run twice."
                )
            marks |= {node: self._mark(node, number, path, effects) for number, node in enumerate(nodes[a:b], a)}
            freed = sum(effects.storages[key].bytes for key in _freed(effects, nodes[a:b]))
            findings.apply(nodes[a], f"{b - a} nodes up to {nodes[b - 1].name}, {format_bytes(freed)} not kept")
        for a, b in self.plan.keeping:
            for number in range(a, b):
                if save_bytes_of(effects, nodes[number], self.on_demand) >= 0:
                    marks[nodes[number]] = replace(marks.get(nodes[number], UNMARKED), keep=number)
        for node in nodes if self.on_demand else ():
            in_turn = _VALUE_AT[node.target] if self.in_turn and _narrows(node) else None
            marks[node] = replace(marks.get(node, UNMARKED), settled=True, in_turn=in_turn)
        return Marks(tuple((node.name, mark) for node, mark in marks.items())), findings.result()

    def _mark(self, node: fx.Node, number: int, path: tuple[int, ...], effects: Effects) -> NodeMark:
        """That of the node of this number in the segment of these numbers."""
        facts = effects.of[node]
        mark = NodeMark(path, facts.random, draw=self.on_demand and _draws_few(node, effects))
        if self._keeps_statistics(node, effects):
            return replace(mark, statistics=number)
        if node in effects.counters:
            return replace(mark, skipped=True)
        attributes = (n for n in node.all_input_nodes if n.op == "get_attr")
        once = tuple(n.name for n in attributes if effects.of[n].outputs & facts.statistics)
        return replace(mark, once=once)

    def _keeps_statistics(self, node: fx.Node, effects: Effects) -> bool:
        """Compiled code would rather keep a result that products read."""
        keeps = self.statistics and keeps_statistics(node)
        return keeps and not (self.on_demand and feeds_products(node, effects))


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


def _freed(effects: Effects, nodes: list[fx.Node]) -> set[int]:
    """What autograd would keep of these nodes and now does not: all they make, but what is used after them."""
    inside = set(nodes)
    made = {
        key for n in nodes for key in effects.of[n].saved if effects.order[effects.storages[key].producer] in inside
    }
    out = {key for n in nodes if any(user not in inside for user in n.users) for key in effects.of[n].outputs}
    return {key for key in made if effects.storages[key].origin == "node"} - out
