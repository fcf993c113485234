"""Observed effects as the numbers a planner works on."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from memrewrite.costs import Costs
from memrewrite.observe.effects import Effects, autocast_switch, computing
from memrewrite.observe.watermarks import Watermarks
from memrewrite.plan.segments import Bytes, Chain, Held
from memrewrite.runtime.segment import PRODUCTS
from memrewrite.torch_internals.pytrees import tree_iter

_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)  # of the bytes of all products, those that are kept


def compute_nodes(effects: Effects) -> list[fx.Node]:
    """The nodes that run: all but inputs, attributes and the output."""
    return computing(effects.order)


def join(chains: list[Chain]) -> Chain:
    """The chains of regions that run one after the other as one, with a node between any two that may not run again."""
    if len(chains) == 1:
        return chains[0]
    boundary = node_of(0, chains[0].segment_ms)
    parts = [part for each in chains for part in (boundary, each)][1:]
    later = np.cumsum([0, *(part.gradients for part in reversed(parts))])[:-1][::-1]
    return end_to_end([with_more(part, int(made)) for part, made in zip(parts, later, strict=True)])


def with_more(part: Chain, made: int) -> Chain:
    """The same, while so many bytes more are there in backward."""
    return replace(part, work=part.work + made, pending=part.pending + made)


def end_to_end(parts: list[Chain]) -> Chain:
    """The nodes of chains one after the other, and nothing else; it runs again as the first one does."""
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    return Chain(
        ms=np.concatenate([part.ms for part in parts]),
        rerun_ms=np.concatenate([part.rerun_ms for part in parts]),
        saves=np.concatenate([part.saves for part in parts]),
        barrier=np.concatenate([part.barrier + start for part, start in zip(parts, starts, strict=True)]),
        work=np.concatenate([part.work for part in parts]),
        forward=np.concatenate([part.forward for part in parts]),
        pending=np.concatenate([part.pending for part in parts]),
        storages=tuple(s.moved(int(start)) for part, start in zip(parts, starts, strict=True) for s in part.storages),
        segment_ms=parts[0].segment_ms,
        on_demand=parts[0].on_demand,
        gradients=sum(part.gradients for part in parts),
    )


def node_of(taken: int, segment_ms: float) -> Chain:
    """A node that may not run again, keeps nothing, and takes some bytes forward and backward."""
    beside = np.array([taken], dtype=np.int64)
    return Chain(
        ms=np.zeros(1),
        rerun_ms=np.zeros(1),
        saves=np.zeros(1, dtype=np.bool_),
        barrier=np.zeros(1, dtype=np.int64),
        work=beside,
        forward=beside,
        pending=np.zeros(1, dtype=np.int64),
        storages=(),
        segment_ms=segment_ms,
    )


def chain(effects: Effects, watermarks: Mapping[fx.Node, Watermarks], costs: Costs, on_demand: bool = False) -> Chain:
    """The chain of ``compute_nodes(effects)``, which may be computed again ``on_demand``. Pure: nothing is run."""
    nodes = compute_nodes(effects)
    facts = [effects.of[node] for node in nodes]
    storages = held_storages(effects, nodes)
    forward, work, pending = _beside(storages, [watermarks[node] for node in nodes])
    ms = np.array([costs.again_ms(node, effects.of[node]) for node in nodes])
    save_bytes = np.array([save_bytes_of(effects, node, on_demand) for node in nodes], dtype=np.int64)
    return Chain(
        ms=ms,
        rerun_ms=np.array([costs.rerun_ms(node, effects.of[node]) for node in nodes]),
        saves=np.array([bool(f.saved) for f in facts]),
        barrier=barrier(effects, nodes),
        work=work,
        forward=forward,
        pending=pending,
        storages=tuple(storages.values()),
        segment_ms=costs.roofline.segment_ms,
        gradients=_gradients(effects),
        save_bytes=_choices(save_bytes, ms) if on_demand else (save_bytes,),
        on_demand=on_demand,
    )


def barrier(effects: Effects, nodes: list[fx.Node]) -> Bytes:
    """Per node, the first node that an interval beginning there may not hold; itself where none may begin there.

    An interval runs again as a whole after the forward pass and has to give the same values. So nothing in it may touch
    an activation that was there before the interval and is written in it or after it: the values of before are gone.
    What an interval makes itself it may also write, and what was written before it is as it was.
    """
    never = _never(effects, nodes)
    found = np.full(len(nodes), len(nodes), dtype=np.int64)
    for i in np.flatnonzero(never)[::-1]:
        found[: i + 1] = i
    index = {node: i for i, node in enumerate(nodes)}
    touching: dict[int, list[int]] = defaultdict(list)
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        facts = effects.of[node]
        for key in facts.reads | facts.writes:
            touching[key].append(i)
        last |= dict.fromkeys((key for key in facts.writes if effects.storages[key].origin == "node"), i)
    for key, end in last.items():
        made = index.get(effects.order[effects.storages[key].producer], -1)
        begins, touches = np.arange(made + 1, end + 1), np.array(touching[key])
        found[begins] = np.minimum(found[begins], touches[np.searchsorted(touches, begins)])
    return found


def _never(effects: Effects, nodes: list[fx.Node]) -> list[bool]:
    """Whether each node may run again in no interval at all.

    So it is with a node that touches what is not the forward pass's own and is written in it (statistics and counters
    nobody reads are updated once, see ``passes/checkpoint_segments.py``): a later forward pass may write it again
    before backward. So with one that changes what it has saved or does not repeat what it gave, and with those between
    switches of the grad or autocast mode, and with those that touch what is written once autograd has kept it: where
    nobody tells autograd, as a kernel's launch does not, backward computes with what is written, and what runs again
    ends before that.
    """
    late = _written_late(effects, nodes)
    written = {key for node in nodes for key in effects.of[node].writes if effects.storages[key].origin != "node"}
    found = []
    depth = 0
    for node in nodes:
        f = effects.of[node]
        depth += _switch(node)
        dirty = bool((f.reads | f.writes) & written - f.statistics) and node not in effects.counters
        asks = node.target is torch.is_grad_enabled  # for the mode of the forward pass
        dirty |= bool((f.reads | f.writes | f.outputs | f.saved) & late)
        found.append(dirty or f.stale_save or not f.repeats or depth > 0 or _switch(node) != 0 or asks)
    return found


def _written_late(effects: Effects, nodes: list[fx.Node]) -> set[int]:
    """The storages that a node writes, but for statistics, after another one has had autograd keep them."""
    kept, found = set[int](), set[int]()
    for node in nodes:
        facts = effects.of[node]
        found |= (facts.writes - facts.statistics) & kept
        kept |= facts.saved
    return found


def _switch(node: fx.Node) -> int:
    """+1 where a grad or autocast region opens, -1 where it closes."""
    if getattr(node.target, "__name__", "") == "_set_grad_enabled":
        return -1 if node.args[0] else 1
    return autocast_switch(node)


def held_storages(effects: Effects, nodes: list[fx.Node]) -> dict[int, Held]:
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
            after = tuple(dict.fromkeys(i for i in uses[key] if i > producer)) or (producer,)
            held[key] = Held(storage.bytes, producer, after, savers.get(key))
    return held


def save_bytes_of(effects: Effects, node: fx.Node, on_demand: bool) -> int:
    """What it takes to keep what only ``node`` makes instead of running it again with its segment; -1 if it has to run.

    Worth it is what computes much and saves its result besides what it is given: attention, recurrent layers. Where
    nodes run again ``on_demand``, one by one, all that computes much. Nothing may write what is kept.
    """
    f = effects.of[node]
    inputs = {key for source in node.all_input_nodes for key in effects.of[source].outputs}
    saves_inputs = any(effects.storages[key].origin == "node" for key in f.saved & inputs)
    worth = f.flops if on_demand else f.rerun[0] and f.saves_output and saves_inputs
    made = (f.outputs if on_demand and node.target in PRODUCTS else f.saved | f.outputs) - inputs
    if node.op != "call_function" or f.writes or not worth or made & effects.written:
        return -1
    return sum(effects.storages[key].bytes for key in made)


def _choices(save_bytes: Bytes, ms: NDArray[np.float64]) -> tuple[Bytes, ...]:
    """Of the nodes that can be kept: all, and those that take the most ms a byte, in fewer and fewer bytes."""
    if not len(save_bytes):
        return ()
    worth = np.where(save_bytes > 0, ms / np.maximum(save_bytes, 1), np.where(save_bytes == 0, np.inf, -1.0))
    order = np.argsort(-worth, kind="stable")
    sizes = np.maximum(save_bytes[order], 0).cumsum()
    found = []
    for share in _SHARES:
        count = int(np.searchsorted(sizes, share * sizes[-1], side="right"))
        least = worth[order[count - 1]] if count else np.inf
        found.append(np.where((save_bytes >= 0) & (worth >= least), save_bytes, -1))
    return tuple(found)


def _beside(storages: dict[int, Held], watermarks: list[Watermarks]) -> tuple[Bytes, Bytes, Bytes]:
    """What was in use at each node, forward, backward and as backward came to it, besides what autograd kept then."""
    made, saved = np.zeros(len(watermarks), dtype=np.int64), np.zeros(len(watermarks), dtype=np.int64)
    for held in storages.values():
        if held.saver is not None:
            made[held.producer] += held.bytes
            saved[held.saver] += held.bytes
    forward = np.array([mark.forward for mark in watermarks], dtype=np.int64) - made.cumsum()
    backward = np.array([mark.backward for mark in watermarks], dtype=np.int64) - saved.cumsum()
    pending = np.array([mark.pending for mark in watermarks], dtype=np.int64) - saved.cumsum()
    for i in range(1, len(watermarks)):
        if not watermarks[i].backward:  # backward passes it by
            pending[i] = pending[i - 1]
    return np.maximum(forward, 0), np.maximum(backward, 0), np.maximum(pending, 0)


def _gradients(effects: Effects) -> int:
    """The bytes of the parameter gradients that the backward of the graph makes."""
    trained = _differentiable(effects)
    read = {key for node, facts in effects.of.items() if node.op != "get_attr" for key in facts.reads & trained}
    return sum(effects.storages[key].bytes for key in read if effects.storages[key].origin == "parameter")


def _differentiable(effects: Effects) -> set[int]:
    """The storages that hold a value with a gradient."""
    found: set[int] = set()
    for node, facts in effects.of.items():
        values = tree_iter(node.meta["val"])
        if node.op != "output" and any(isinstance(v, Tensor) and v.requires_grad for v in values):
            found |= facts.outputs
    return found
