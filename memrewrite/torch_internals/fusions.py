"""Inductor makes kernels one only where what lives meanwhile stays within some bytes. Read in PyTorch 2.11 to 2.14.

Inductor fuses whatever reads the same or what the other makes. A kernel that waits for another holds what it reads
until then: of a gate in bf16 that is a sum of one product in bf16 and one in float32, three times as much as the gate,
through both products of the other half of a gated MLP. Where kernels stand is known before any is fused, and the bytes
that live there with it; a fusion that would let more live than there are is none.

Of the orders that Inductor then knows that of the fewest bytes is taken, this one among them, by the same count. In
that order each of several results is taken at once from what an operator returns: until the last one is, all of them
live, and Inductor takes gradients of weights, which nothing reads, where backward ends.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from memrewrite.torch_internals.compiled_code import is_beside
from memrewrite.torch_internals.kernel_order import KernelOrder, Operation, Value
from memrewrite.torch_internals.versions import private_imports
from memrewrite.torch_internals.written_over import is_elementwise

SCRATCH = "memrewrite_scratch"
"""In the ``meta`` of a node: the bytes that it takes while it runs besides its results."""

Room = Callable[[bool], int | None]
"""The bytes that a graph of backward (True) or of forward may make and be given to let go of; None: any number."""


@contextlib.contextmanager
def fused_within(room: Room) -> Iterator[None]:
    """Kernels are fused meanwhile as long as what lives has that ``room``, or takes no more than without."""
    with private_imports():
        from torch._inductor import memory
        from torch._inductor.scheduler import Scheduler
        from torch._inductor.virtualized import V
    creates_cycle, fuse, reorder = (
        Scheduler.will_fusion_create_cycle,
        Scheduler.fuse_two_nodes,
        memory.reorder_for_peak_memory,
    )
    known: dict[Any, _Fusions] = {}

    def of(scheduler: Any) -> "_Fusions | None":
        if V.graph.name or is_beside() or (most := room(bool(V.graph.is_backward))) is None:
            return None  # it is a part of a graph, another graph, or may take what it will
        if scheduler not in known:
            known.clear()
            known[scheduler] = _Fusions(scheduler, most)
        return known[scheduler]

    def refuses(scheduler: Any, node1: Any, node2: Any) -> bool:
        if creates_cycle(scheduler, node1, node2):
            return True
        fusions = of(scheduler)
        return fusions is not None and not fusions.fit(node1, node2)

    def fused(scheduler: Any, node1: Any, node2: Any, *rest: Any) -> Any:
        if (fusions := of(scheduler)) is not None:
            fusions.fuse(node1, node2)
        return fuse(scheduler, node1, node2, *rest)

    def reordered(nodes: list[Any], *rest: Any, **options: Any) -> list[Any]:
        found = reorder(nodes, *rest, **options)
        fusions = of(V.graph.scheduler)
        return _taken_apart(found if fusions is None else fusions.reordered(nodes, found))

    with (
        mock.patch.object(Scheduler, "will_fusion_create_cycle", refuses),
        mock.patch.object(Scheduler, "fuse_two_nodes", fused),
        mock.patch.object(memory, "reorder_for_peak_memory", reordered),
    ):
        yield


class _Fusions:
    """The nodes of a scheduler before it fuses any, as numbers."""

    def __init__(self, scheduler: Any, room: int) -> None:
        self._scheduler, self._room = scheduler, room
        nodes = scheduler.nodes
        self._number = {name: i for i, node in enumerate(nodes) for name in _names(node)}
        self._maker = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
        self._whole = _wholes(scheduler)
        self._values = _values(scheduler, self._whole)
        self._parts = self._parts_by_source()
        self._operations = [self._operation(i, node) for i, node in enumerate(nodes)]
        self._order = KernelOrder(self._operations, self._values)

    def fit(self, node1: Any, node2: Any) -> bool:
        """Whether two nodes may be one."""
        one, other = self._number_of(node1), self._number_of(node2)
        found = self._order.fused(one, other)
        return found is not None and found.peak <= max(self._room, self._order.peak_between(one, other))

    def fuse(self, node1: Any, node2: Any) -> None:
        """Two nodes are one."""
        self._order.fuse(self._number_of(node1), self._number_of(node2))

    def reordered(self, nodes: list[Any], found: list[Any]) -> list[Any]:
        """The nodes, which Inductor would run as ``found``: so, or where that takes more than there is room for, in the
        order of the fewest bytes that is known."""
        if (least := self._peak(found)) <= self._room:
            return found
        for other in (self._as_here(nodes), nodes):
            if (peak := self._peak(other)) < least:
                found, least = other, peak
        return found

    def _peak(self, nodes: list[Any]) -> int:
        """The most bytes that live where nodes run in this order."""
        kernels = [[self._number[name] for name in _names(node)] for node in nodes]
        return KernelOrder(self._operations, self._values, kernels).peak

    def _as_here(self, nodes: list[Any]) -> list[Any]:
        """The nodes as they stand here, each after those that it needs."""
        import networkx  # not every run needs it

        owner = {self._number[name]: i for i, node in enumerate(nodes) for name in _names(node)}
        needed = [(owner[source], i) for number, i in owner.items() for source in self._operations[number].after]
        place = [self._order.place(self._number_of(node)) for node in nodes]
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(nodes)))
        graph.add_edges_from((source, i) for source, i in needed if source != i)
        return [nodes[i] for i in networkx.lexicographical_topological_sort(graph, place.__getitem__)]

    def _number_of(self, node: Any) -> int:
        return self._number[_names(node)[0]]

    def _parts_by_source(self) -> dict[int, list[str]]:
        """The values that are parts of what a node makes, which allocates them all."""
        found: dict[int, list[str]] = {}
        for source, part in _parts(self._scheduler.nodes):
            names = [name for name in part.get_buffer_names() if name in self._values]
            found.setdefault(self._number_of(source), []).extend(names)
        return found

    def _operation(self, number: int, node: Any) -> Operation:
        own = () if _is_part(node) else node.get_buffer_names()
        reads = {self._lies_in(dep.name) for dep in node.read_writes.reads if not getattr(dep, "is_fake", False)}
        written = {self._lies_in(name) for name in own if name not in self._scheduler.mutation_real_name}
        after = {self._maker[dep.name] for dep in node.unmet_dependencies if dep.name in self._maker}
        return Operation(
            (*sorted(written & self._values.keys() & self._maker.keys()), *self._parts.get(number, ())),
            frozenset(reads & self._values.keys()),
            frozenset(after - {number}),
            is_elementwise(node),
            _scratch(node),
        )

    def _lies_in(self, name: str) -> str:
        """The value that another is before it is written again, or that it lies in."""
        while (before := self._scheduler.mutation_real_name.get(name, self._whole.get(name))) is not None:
            name = before
        return name


def _wholes(scheduler: Any) -> dict[str, str]:
    """What is written right into a part of another value, as the parts of a concatenation are, with that.

    Nothing else is allocated for it, and all of that as soon as the first part is written.
    """
    from torch._inductor.ir import NonOwningLayout

    layouts = {name: buffer.node.layout for name, buffer in scheduler.name_to_buf.items()}
    found = {name: each.view.get_name() for name, each in layouts.items() if isinstance(each, NonOwningLayout)}
    for name, whole in found.items():
        while whole in found:  # which is a part itself
            whole = found[whole]
        found[name] = whole
    return found


def _values(scheduler: Any, whole: Mapping[str, str]) -> dict[str, Value]:
    """What nodes make, and what the graph is given and lets go of."""
    with private_imports():
        from torch._inductor import memory
        from torch._inductor.virtualized import V
        from torch.utils._ordered_set import OrderedSet
    stays, in_parts = {whole.get(name, name) for name in V.graph.get_output_names()}, {*whole.values()}
    found = {}
    for name, (_, size) in memory.compute_size_for_scheduler_buffer(scheduler.name_to_buf).items():
        if size and name not in whole:
            # Over what is written in parts Inductor writes nothing.
            kind = name if name in in_parts else scheduler.name_to_buf[name].node.get_dtype()
            found[name] = Value(int(size), kind, name in stays)
    given = V.graph.graph_inputs
    for name, buffer in memory.get_freeable_input_buf(scheduler.nodes, OrderedSet(given.keys())).items():
        kind, count = given[name].get_dtype(), given[name].get_numel()
        # Inductor counts what is read, which of a value that is expanded there is more than there is.
        size = int(count) * kind.itemsize if count.is_number else buffer.mpi_buffer.size_free
        found[name] = Value(size, kind, name in stays)
    return found


def _names(node: Any) -> list[str]:
    return [each.get_name() for each in node.get_nodes()]


def _taken_apart(nodes: list[Any]) -> list[Any]:
    """The nodes in their order, but for each part of what one makes, which comes right after that."""
    made = {name for node in nodes for name in node.get_buffer_names()}
    parts: dict[Any, list[Any]] = {}
    for source, part in _parts(nodes):
        if {dep.name for dep in part.unmet_dependencies} & made <= {*source.get_buffer_names()}:
            parts.setdefault(source, []).append(part)
    moved = {node for each in parts.values() for node in each}
    found: list[Any] = []
    left = [node for node in reversed(nodes) if node not in moved]
    while left:
        found.append(left.pop())
        left += reversed(parts.get(found[-1], []))
    return found


def _parts(nodes: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The nodes that give a part of what others make, each after the one that makes it."""
    maker = {name: node for node in nodes for name in node.get_buffer_names()}
    for node in filter(_is_part, nodes):
        yield next(maker[dep.name] for dep in node.read_writes.reads if dep.name in maker), node


def _is_part(node: Any) -> bool:
    """Whether a node gives a part of what another makes."""
    from torch._inductor.ir import MultiOutput

    return isinstance(node.node, MultiOutput)


def _scratch(node: Any) -> int:
    """What an operator takes while it runs that is called as it is."""
    operator = getattr(node.node, "op_overload", None)
    origins = getattr(node.node, "origins", ())
    return max((each.meta.get(SCRATCH, 0) for each in origins if each.target is operator), default=0)
