"""Observed effects as the numbers a planner works on."""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor, fx

from memrewrite.costs import ROOFLINES, node_ms
from memrewrite.effects import Effects
from memrewrite.plan.segments import Bytes, Chain, Held
from memrewrite.private import tree_iter


def compute_nodes(effects: Effects) -> list[fx.Node]:
    """The nodes that run: all but inputs, attributes and the output."""
    return [node for node in effects.order if node.op not in ("placeholder", "get_attr", "output")]


def compute_nodes_of(graph_module: fx.GraphModule) -> list[fx.Node]:
    """``compute_nodes`` of a graph that need not be observed for it."""
    return [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def join(chains: list[Chain]) -> Chain:
    """The chains of regions that run one after the other as one, with a node between any two that may not run again."""
    if len(chains) == 1:
        return chains[0]
    boundary = Chain(
        ms=np.zeros(1),
        rerun_ms=np.zeros(1),
        saves=np.zeros(1, dtype=np.bool_),
        movable=np.zeros(1, dtype=np.bool_),
        work=np.zeros(1, dtype=np.int64),
        storages=(),
        segment_ms=chains[0].segment_ms,
    )
    parts = [part for each in chains for part in (boundary, each)][1:]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    later = np.cumsum([0, *(part.gradients for part in reversed(parts))])[:-1][::-1]
    return Chain(
        ms=np.concatenate([part.ms for part in parts]),
        rerun_ms=np.concatenate([part.rerun_ms for part in parts]),
        saves=np.concatenate([part.saves for part in parts]),
        movable=np.concatenate([part.movable for part in parts]),
        work=np.concatenate([part.work + made for part, made in zip(parts, later, strict=True)]),
        storages=tuple(s.moved(int(start)) for part, start in zip(parts, starts, strict=False) for s in part.storages),
        segment_ms=chains[0].segment_ms,
        gradients=sum(part.gradients for part in parts),
    )


def chain(effects: Effects, device: str, amp: torch.dtype | None) -> Chain:
    """The chain of ``compute_nodes(effects)``. Pure: nothing is run."""
    nodes = compute_nodes(effects)
    facts = [effects.of[node] for node in nodes]
    storages = _held(effects, nodes)
    made = _made(effects, nodes)
    return Chain(
        ms=np.array([node_ms((f.flops, f.moved), device, amp) for f in facts]),
        rerun_ms=np.array([node_ms(f.rerun, device, amp) for f in facts]),
        saves=np.array([bool(f.saved) for f in facts]),
        movable=np.array(movable(effects, nodes)),
        work=_passing(effects, nodes, storages) + np.cumsum(made[::-1])[::-1],
        storages=tuple(storages.values()),
        segment_ms=ROOFLINES[device].segment_ms,
        gradients=int(made.sum()),
    )


def movable(effects: Effects, nodes: list[fx.Node]) -> list[bool]:
    """Whether each node gives the same values when it runs a second time, after the whole forward pass.

    Not so: a node that reads what any node writes, one that writes what was there before it (statistics and counters
    nobody reads are updated once, see ``passes/checkpoint_segments.py``), one that changes what it has saved, and
    nodes between switches of the grad or autocast mode.
    """
    facts = [effects.of[node] for node in nodes]
    written = {key for f in facts for key in f.writes}
    may = []
    depth = 0
    for node, f in zip(nodes, facts, strict=True):
        depth += _switch(node)
        counter = is_counter(effects, node)
        clean = not (f.reads & written) - f.statistics and not f.writes - f.statistics
        may.append((clean or counter) and not f.stale_save and depth == 0 and not _switch(node))
    return may


def is_counter(effects: Effects, node: fx.Node) -> bool:
    """Whether a node only updates buffers that no other node touches (``num_batches_tracked += 1``)."""
    f = effects.of[node]
    if not f.writes or node.users or any(effects.storages[key].origin != "buffer" for key in f.writes | f.outputs):
        return False
    others = (o for n, o in effects.of.items() if n is not node and n.op not in ("get_attr", "placeholder"))
    return not any(o.reads & f.writes for o in others)


def _switch(node: fx.Node) -> int:
    """+1 where a mode region opens, -1 where it closes (Dynamo's graphs spell them as calls)."""
    name = getattr(node.target, "__name__", "")
    if name == "_set_grad_enabled":
        return -1 if node.args[0] else 1
    return {"_enter_autocast": 1, "_exit_autocast": -1}.get(name, 0)


def _held(effects: Effects, nodes: list[fx.Node]) -> dict[int, Held]:
    """The storages that nodes make, in order of making."""
    index = {node: i for i, node in enumerate(nodes)}
    uses: dict[int, list[int]] = defaultdict(list)
    savers: dict[int, int] = {}
    for node, facts in effects.of.items():
        i = len(nodes) if node.op == "output" else index.get(node, -1)
        for key in facts.reads:
            uses[key].append(i)
        for key in facts.saved:
            savers.setdefault(key, i)
    held = {}
    for key, storage in effects.storages.items():
        producer = index.get(effects.order[storage.producer], -1) if storage.producer >= 0 else -1
        if producer >= 0 and storage.bytes:
            after = [i for i in uses[key] if i > producer] or [producer]
            held[key] = Held(storage.bytes, producer, after[0], after[-1], savers.get(key))
    return held


def _passing(effects: Effects, nodes: list[fx.Node], storages: dict[int, Held]) -> Bytes:
    """Per node, the bytes of the gradients of the values that pass it."""
    n = len(nodes)
    steps = np.zeros(n + 1, dtype=np.int64)
    trained = _differentiable(effects)
    for key, held in storages.items():
        if key in trained:
            steps[held.producer] += held.bytes
            steps[min(held.last_use, n - 1) + 1] -= held.bytes
    return np.cumsum(steps)[:n]


def _made(effects: Effects, nodes: list[fx.Node]) -> Bytes:
    """Per node, the bytes of the parameter gradients that its backward is the first to make."""
    made = np.zeros(len(nodes), dtype=np.int64)
    trained = _differentiable(effects)
    readers: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for key in effects.of[node].reads & trained:
            if effects.storages[key].origin == "parameter":
                readers[key] = i
    for key, i in readers.items():
        made[i] += effects.storages[key].bytes
    return made


def _differentiable(effects: Effects) -> set[int]:
    """The storages that hold a value with a gradient."""
    found: set[int] = set()
    for node, facts in effects.of.items():
        values = tree_iter(node.meta["val"])
        if node.op != "output" and any(isinstance(v, Tensor) and v.requires_grad for v in values):
            found |= facts.outputs
    return found
