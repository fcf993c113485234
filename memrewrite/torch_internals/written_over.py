"""Inductor's elementwise kernels write over all that they are the last to read. Read in PyTorch 2.11 to 2.14.

Inductor lets an output take the place of an input that one expression of the kernel reads, and no other. The backward
of a gated activation is one kernel that makes three values of three that die in it, each of which is read twice: six
buffers of the widest kind in the model where three do. What a kernel writes over, and that every read and write is of
the same element, is for Inductor alone to decide: here it is told only that the other readers are in the same kernel.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock
from weakref import WeakSet

from memrewrite.torch_internals.versions import private_imports


@contextlib.contextmanager
def written_over() -> Iterator[None]:
    """Kernels that are generated meanwhile write over more of their inputs."""
    with private_imports():
        from torch._inductor.codegen.common import Kernel
        from torch._inductor.scheduler import SchedulerNode
        from torch._inductor.virtualized import V
    decide = SchedulerNode.decide_inplace_update
    decided: WeakSet[Any] = WeakSet()  # kernels

    def told(node: Any) -> None:
        if V.kernel in decided:
            return
        kernel = _same_kernel(node)
        if kernel is None:
            decide(node)
            return
        decided.add(V.kernel)  # all at once, before there is a buffer for a value that is not written
        for part in node.scheduler.get_fused_node(node).get_nodes():
            if not _stays_inside(part, kernel):
                placed(part, kernel)

    def placed(node: Any, kernel: set[str]) -> bool:
        """Over what the node reads; else over what is read for a value that it reads and that nobody writes."""
        inner = {name: maker for name, maker in _makers(node).items() if _stays_inside(maker, kernel)}
        if written(node, kernel, {*inner}):
            return True
        taken = {*_places().values()}
        with V.set_kernel_handler(Kernel(increase_kernel_count=False)):  # where nothing is decided yet
            over = written(node, kernel, taken)
        return any(placed(inner[name], kernel) for name in over) and bool(written(node, kernel, set()))

    def written(node: Any, kernel: set[str], barred: set[str]) -> set[str]:
        """What the node writes over. The others read before the kernel writes, and no place is there twice."""
        taken = {*_places().values()}
        done = _with_more(node.scheduler.completed_operations, kernel - {node.get_name()})
        with done, _with_more(V.graph.never_reuse_buffers, taken | barred):
            decide(node)
        return {*_places().values()} - taken

    with mock.patch.object(SchedulerNode, "decide_inplace_update", told):
        yield


def _same_kernel(node: Any) -> set[str] | None:
    """The names of what is in the kernel of a node, where all of that is elementwise.

    A reduction may read in a later pass what was written in an earlier one.
    """
    from torch._inductor.scheduler import FusedSchedulerNode

    fused = node.scheduler.get_fused_node(node)
    if type(fused) is not FusedSchedulerNode:  # its subclasses are several kernels, or end in a product
        return None
    return {part.get_name() for part in fused.get_nodes()} if is_elementwise(fused) else None


def is_elementwise(node: Any) -> bool:
    """Whether all that a node consists of computes one element after the other."""
    from torch._inductor.scheduler import SchedulerNode

    return all(
        isinstance(part, SchedulerNode) and not part.is_reduction() and not part.is_template()
        for part in node.get_nodes()
    )


def _places() -> dict[str, str]:
    """What each output of the kernel that is generated is written over."""
    from torch._inductor.virtualized import V

    return getattr(V.kernel, "inplace_update_buffers", {})


def _makers(node: Any) -> dict[str, Any]:
    """The nodes of the same kernel by the values that a node reads."""
    values = node.scheduler.name_to_buf
    read = {read.name: values[read.name].defining_op for read in node.read_writes.reads if read.name in values}
    kernel = node.scheduler.get_fused_node(node).get_nodes()
    return {name: maker for name, maker in read.items() if maker in kernel}


def _stays_inside(node: Any, kernel: set[str]) -> bool:
    """Whether what a node makes is never written."""
    gone = node.scheduler.can_buffer_be_removed_through_fusion
    return all(gone(output.get_name(), kernel) for output in node.get_outputs())


@contextlib.contextmanager
def _with_more(names: Any, more: set[str]) -> Iterator[None]:
    """Names meanwhile in a set, too."""
    new = more - names
    names.update(new)
    try:
        yield
    finally:
        names.difference_update(new)
