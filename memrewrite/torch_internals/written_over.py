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

from memrewrite.torch_internals.versions import private_imports


@contextlib.contextmanager
def written_over() -> Iterator[None]:
    """Kernels that are generated meanwhile write over more of their inputs."""
    with private_imports():
        from torch._inductor.scheduler import SchedulerNode
        from torch._inductor.virtualized import V
    decide = SchedulerNode.decide_inplace_update

    def told(node: Any) -> None:
        others = _same_kernel(node)
        if others is None:
            decide(node)
        elif not _stays_inside(node, others):
            # The others read before the kernel writes, and what one output was written over is not there twice.
            done = _with_more(node.scheduler.completed_operations, others - {node.get_name()})
            taken = {*getattr(V.kernel, "inplace_update_buffers", {}).values()}
            with done, _with_more(V.graph.never_reuse_buffers, taken):
                decide(node)

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


def _stays_inside(node: Any, kernel: set[str]) -> bool:
    """Whether what a node makes is never written, so that it is to leave the place to others."""
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
