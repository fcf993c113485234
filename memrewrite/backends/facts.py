"""A joint graph as numbers: what each node reads, makes and costs, and whether it may run again.

A node counts for forward where no tangent reaches it, also one whose result only backward needs. Storages are counted,
not tensors: a view and an element of a tuple lie in what was made before them. What lies in an input of the graph is
there anyway and counts nothing.
"""

import functools
import operator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from memrewrite.backends.scratch import scratch
from memrewrite.costs import ROOFLINES, Roofline
from memrewrite.observe.flops import FLOPS
from memrewrite.runtime.linear_cross_entropy import LOSS
from memrewrite.runtime.tied_embedding import ADDED
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.partitioning import (
    Divided,
    count_bytes,
    draws,
    fuses,
    is_symbol,
    is_tangent,
    is_view,
    must_rerun,
    must_save,
    number,
    reads_fused,
    repeats,
)

_HALF = (torch.float16, torch.bfloat16)
_HEAVY = {torch.ops.aten.exp.default, torch.ops.aten.sigmoid.default}  # of those Inductor has, which it names so


@dataclass(frozen=True)
class Facts:
    """What is known of the nodes of a joint graph, in order; a node is its number, a storage is one, too.

    ``inputs`` are the nodes each reads, ``holds`` the storages its value lies in, ``makes`` those it makes, ``bytes``
    their sizes (0 where the graph was given them). ``forward`` says that no tangent reaches it, ``place`` is the number
    of the last node of the forward pass that it is made of, itself if it is one. ``given`` are inputs
    and constants, ``symbols`` sizes, ``views`` what makes nothing. ``fused`` nodes are made in the kernel that reads
    them, and ``reader`` nodes make what they read there; ``heavy`` ones, on the CPU, are not made twice. ``may_rerun``
    are the nodes that can run again, ``must_rerun`` those that have to, ``costly`` those that take a while, ``ms`` how
    long, ``scratch`` the bytes that each takes meanwhile besides what it makes. ``savable`` are values that can be
    handed to backward. ``outputs`` of forward and ``gradients`` stay until the end; ``tangents`` come with backward.
    ``held`` are the bytes of what the step before gave, while forward runs, and ``outside`` those that a loss which is
    no part of the graph takes while all that is kept for backward lives; ``share`` is as in ``scratch``. ``stored`` are
    ``fused`` ones that backward writes all the same.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[tuple[int, ...], ...]
    holds: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    forward: tuple[bool, ...]
    place: tuple[int, ...]
    given: frozenset[int]
    symbols: frozenset[int]
    views: frozenset[int]
    fused: frozenset[int]
    reader: frozenset[int]
    heavy: frozenset[int]
    may_rerun: frozenset[int]
    must_rerun: frozenset[int]
    costly: frozenset[int]
    savable: frozenset[int]
    ms: tuple[float, ...]
    scratch: tuple[int, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    tangents: tuple[int, ...]
    held: int = 0
    outside: int = 0
    share: int = 1
    stored: frozenset[int] = frozenset()

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """For each node the bytes of the storages that its value lies in."""
        return tuple(sum(self.bytes[storage] for storage in lies) for lies in self.holds)

    @property
    def beside_loss(self) -> int:
        """Bytes of what forward returns besides a loss and asks gradients of, and of those; 0 where it returns none.

        Autograd makes them of zeros where nobody gives any.
        """
        counts = [self.nodes[i].meta["val"].numel() for i in self.tangents]
        larger = [i for i, count in zip(self.tangents, counts, strict=True) if count != 1]
        return 2 * sum(self.sizes[i] for i in larger) if len(larger) < len(counts) else 0

    @functools.cached_property
    def ready(self) -> frozenset[int]:
        """The nodes that neither have to be kept nor run again: what is given, and sizes."""
        return self.given | self.symbols


def same(one: Facts, other: Facts) -> bool:
    """Whether two graphs are the same but for what they are made of, so that plans of one are plans of the other."""
    if replace(one, nodes=()) != replace(other, nodes=()):
        return False
    pairs = zip(one.nodes, other.nodes, strict=True)
    return all((a.op, a.name, str(a.target)) == (b.op, b.name, str(b.target)) for a, b in pairs)


def with_fewer_rows(known: Facts, share: int) -> Facts:
    """The facts where losses make so many times fewer rows of logits at once."""
    losses = [i for i, node in enumerate(known.nodes) if node.target is LOSS]
    taken = dict(zip(losses, scratch(tuple(known.nodes[i] for i in losses), share), strict=True))
    return replace(known, scratch=tuple(taken.get(i, size) for i, size in enumerate(known.scratch)), share=share)


def facts(joint: fx.GraphModule, divided: Divided, fused: bool = True, held: bool = False) -> Facts:
    """The facts of a prepared joint graph; with ``fused`` False each node is a kernel of its own.

    ``held``: the caller keeps the outputs until it has the next ones.
    """
    nodes = tuple(node for node in joint.graph.nodes if node.op != "output")
    index = {node: i for i, node in enumerate(nodes)}
    storages = _Storages(nodes, index)
    tangents = [i for i, node in enumerate(nodes) if node.op == "placeholder" and node in divided.backward]
    given = {i for i, node in enumerate(nodes) if node.op in ("placeholder", "get_attr")} - set(tangents)
    may = {i for i, node in enumerate(nodes) if repeats(node) and not must_save(node) and node not in divided.backward}
    symbols = {i for i, node in enumerate(nodes) if is_symbol(node)}
    views = {i for i in range(len(nodes)) if not storages.makes[i] and nodes[i].target is not ADDED}
    times = tuple(0.0 if i in given or i in views else node_ms(node) for i, node in enumerate(nodes))
    costly = {i for i in may if _is_costly(nodes[i])}
    given_out = {storage for node in divided.forward_outputs for storage in storages.holds[index[node]]}
    return Facts(
        nodes=nodes,
        inputs=tuple(tuple(index[node] for node in each.all_input_nodes) for each in nodes),
        holds=tuple(storages.holds),
        makes=tuple(storages.makes),
        bytes=tuple(storages.bytes),
        forward=tuple(node not in divided.backward for node in nodes),
        place=_places(nodes, index, divided),
        given=frozenset(given),
        symbols=frozenset(symbols),
        views=frozenset(views),
        fused=frozenset(i for i, node in enumerate(nodes) if fused and fuses(node)),
        reader=frozenset(i for i, node in enumerate(nodes) if fused and reads_fused(node)),
        heavy=frozenset(i for i, node in enumerate(nodes) if node.target in _HEAVY and _device(node) == "cpu"),
        may_rerun=frozenset(may - symbols),
        must_rerun=frozenset(i for i in may if must_rerun(nodes[i])),
        costly=frozenset(costly),
        savable=frozenset(i for i, node in enumerate(nodes) if isinstance(node.meta.get("val"), Tensor)),
        ms=times,
        scratch=scratch(nodes),
        outputs=tuple(index[node] for node in divided.forward_outputs),
        gradients=tuple(index[node] for node in divided.backward_outputs),
        tangents=tuple(tangents),
        held=sum(storages.bytes[storage] for storage in given_out) if held else 0,
    )


class _Storages:
    """Numbers storages as nodes make them."""

    def __init__(self, nodes: tuple[fx.Node, ...], index: dict[fx.Node, int]) -> None:
        self.bytes: list[int] = []
        self.makes: list[tuple[int, ...]] = []
        self.holds: list[tuple[int, ...]] = []
        for node in nodes:
            value = node.meta.get("val")
            source = next(iter(node.all_input_nodes), None)
            if source is not None and _makes_nothing(node):
                found = self.holds[index[source]]
                if node.target is operator.getitem and len(found) > 1 and isinstance(node.args[1], int):
                    found = found[node.args[1] : node.args[1] + 1]
                self.makes.append(())
                self.holds.append(found)
                continue
            there = node.op in ("placeholder", "get_attr") and not is_tangent(node)
            made = tuple(self._new(each, there) for each in _tensors(value))
            self.makes.append(made)
            self.holds.append(made)

    def _new(self, tensor: Tensor | None, there: bool) -> int:
        self.bytes.append(0 if there or tensor is None else rounded(count_bytes(tensor)))
        return len(self.bytes) - 1


def _places(nodes: tuple[fx.Node, ...], index: dict[fx.Node, int], divided: Divided) -> tuple[int, ...]:
    found: list[int] = []
    for i, node in enumerate(nodes):
        before = max((found[index[each]] for each in node.all_input_nodes), default=0)
        found.append(i if node in divided.forward else before)
    return tuple(found)


def _tensors(value: object) -> list[Tensor | None]:
    """The tensors of a value, None for another element of a tuple."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each if isinstance(each, Tensor) else None for each in value]
    return []


def _is_costly(node: fx.Node) -> bool:
    """Whether to run a node again takes more than to read what it reads: products, reductions, numbers drawn."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in FLOPS or not (fuses(node) or _makes_nothing(node)):
        return True
    return draws(node)


def _makes_nothing(node: fx.Node) -> bool:
    """Whether what a node gives lies in what it reads: a view, a part of a tuple, or what it adds to."""
    return is_view(node) or node.target in (operator.getitem, ADDED)


def _first(node: fx.Node) -> Tensor | None:
    """The first tensor that a node gives, None where it gives none."""
    return next((t for t in _tensors(node.meta.get("val")) if t is not None), None)


def _device(node: fx.Node) -> str:
    value = _first(node)
    return "" if value is None else value.device.type


def node_ms(node: fx.Node) -> float:
    """What a node takes to run by the roofline of its device, in milliseconds; nothing where it is fused."""
    value = _first(node)
    if value is None or node.op != "call_function" or _makes_nothing(node):
        return 0.0
    roofline = ROOFLINES["cuda" if value.device.type == "cuda" else "cpu"]
    made = sum(count_bytes(t) for t in _tensors(node.meta["val"]) if t is not None)
    read = sum(count_bytes(t) for each in node.all_input_nodes for t in _tensors(each.meta.get("val")) if t is not None)
    return _ms(roofline, _flops(node), made if fuses(node) else made + read, value.dtype)


def _ms(roofline: Roofline, flops: int, moved: int, dtype: torch.dtype) -> float:
    return roofline.ms((flops, moved), dtype if dtype in _HALF else None)


def _flops(node: fx.Node) -> int:
    """The floating-point operations of a product, of its sizes while the graph is traced; 0 of what is none."""
    count = FLOPS.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0

    def shaped(value: object) -> object:
        if isinstance(value, fx.Node):
            return shaped(value.meta["val"])
        if isinstance(value, Tensor):
            return torch.empty([number(size) for size in value.shape], device="meta")
        if isinstance(value, list | tuple):
            return [shaped(each) for each in value]
        return number(value) if isinstance(value, torch.SymInt) else value

    arguments = {name: shaped(value) for name, value in node.kwargs.items()}
    return int(count(*map(shaped, node.args), **arguments, out_val=shaped(node.meta["val"])))
