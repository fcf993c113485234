"""The chain of a model whose parts are calls in its graph and have graphs of their own: each is put in where it runs.

    model    embed   layers.0(x)   layers.1(x)   norm   head
    joined   embed | ............ | ............ norm   head        | a node for the call, then those of the part

No segment crosses a call: a part is run by its own hooks, and whoever runs it again would call them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from memrewrite.plan.segments import Chain, Held, Plan
from memrewrite.plan_facts.chain import end_to_end, join, node_of, with_more


@dataclass(frozen=True)
class Layout:
    """Where the nodes of a graph with ``length`` nodes lie in the joined chain.

    ``parts`` says how many nodes each part has that the call of the node of this number runs, one after the other.
    """

    length: int
    parts: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def positions(self) -> list[int]:
        """The position of every node of the graph, and of its end."""
        sizes = {node: sum(lengths) + len(lengths) for node, lengths in self.parts}  # each after a boundary
        return [0, *np.cumsum([sizes.get(node, 1) for node in range(self.length)]).tolist()]

    def own(self, plan: Plan) -> Plan:
        """What of a plan for the joined chain is for the graph itself."""
        at = {position: node for node, position in enumerate(self.positions[:-1])}
        kinds = (plan.intervals, plan.keeping)
        intervals, keeping = (
            tuple((at[a], at[b - 1] + 1) for a, b in kind if a in at and b - 1 in at) for kind in kinds
        )
        return Plan(intervals, plan.ms, keeping)

    def of_parts(self, plan: Plan) -> list[Plan]:
        """What of it is for each part."""
        found = []
        for node, lengths in self.parts:
            end = self.positions[node]
            for length in lengths:
                start, end = end + 1, end + 1 + length
                found.append(plan.part(start, end))
        return found


def nest(whole: Chain, called: Mapping[int, list[Chain]], made: Mapping[int, int], own: int) -> Chain:
    """The joined chain; ``called`` are the parts by the number of the node whose call runs them, in order.

    ``made`` are the bytes of parameter gradients that ``whole`` counts once backward is through each of these calls,
    where ``gradients`` of the part are what is left of them; ``own`` is what is left of those of the rest.
    """
    layout = Layout(len(whole), tuple((node, tuple(map(len, parts))) for node, parts in called.items()))
    starts, calls = layout.positions, [*called]
    parts = {node: join(chains) for node, chains in called.items()}
    gone = np.zeros(len(whole), dtype=np.int64)  # bytes of gradients that are not there any more
    for node, part in parts.items():
        gone[:node] += max(made[node] - part.gradients, 0)
    whole = replace(whole, work=np.maximum(whole.work - gone, 0), pending=np.maximum(whole.pending - gone, 0))
    pieces: list[Chain] = []  # of one node of the whole each, or a part
    later = own + sum(part.gradients for part in parts.values())
    for node in range(len(whole)):
        pieces.append(node_of(0, whole.segment_ms) if node in parts else _alone(whole, node))
        if node in parts:
            later -= parts[node].gradients
            pieces.append(with_more(parts[node], later))
    joined = end_to_end(pieces)
    barrier = joined.barrier
    for node in set(range(len(whole))) - parts.keys():
        stop = next((call for call in calls if call > node), len(whole))
        barrier[starts[node]] = starts[min(int(whole.barrier[node]), stop)]
    storages = [held for each in whole.storages if (held := _moved(each, starts, set(calls))) is not None]
    return replace(
        joined,
        storages=tuple(sorted([*storages, *joined.storages], key=lambda held: held.producer)),
        gradients=own + sum(part.gradients for part in parts.values()),
        on_demand=whole.on_demand,
    )


def _alone(whole: Chain, node: int) -> Chain:
    """One node."""
    here = slice(node, node + 1)
    return replace(
        whole,
        ms=whole.ms[here],
        rerun_ms=whole.rerun_ms[here],
        saves=whole.saves[here],
        barrier=whole.barrier[here],
        work=whole.work[here],
        forward=whole.forward[here],
        pending=whole.pending[here],
        storages=(),
    )


def _moved(held: Held, starts: list[int], calls: set[int]) -> Held | None:
    """A storage of the whole where its nodes are now; None for one that a part makes and keeps to itself."""
    if held.producer in calls and held.uses == (held.producer,):
        return None
    producer = starts[held.producer + 1] - 1 if held.producer in calls else starts[held.producer]
    uses = tuple(starts[use] for use in held.uses if use != held.producer) or (producer,)
    return Held(held.bytes, producer, uses, None if held.saver is None else max(starts[held.saver], producer))
