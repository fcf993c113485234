"""The times of a whole step, predicted: that of the device and that of the CPU that starts everything.

The step's operators are put in a queue and the CPU waits for none of them, so the two run side by side and the longer
one is the step's.
"""

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, fx

from memrewrite.costs import Costs
from memrewrite.costs.work import Work
from memrewrite.observe.effects import Effects
from memrewrite.plan.marks import NO_MARKS, Marks
from memrewrite.torch_internals.pytrees import tensors_in


def step_times(
    effects: Effects, costs: Costs, others: Iterable[Work], passes: int = 1, marks: Marks = NO_MARKS
) -> tuple[float, float]:
    """Milliseconds of a step on the device and on the CPU: ``passes`` times the graph's nodes, their backward and the
    segments in ``marks``.

    A segment costs the CPU its fixed time besides that of starting its nodes again. ``others`` (losses, optimizer) move
    their bytes at the roofline's rate.
    """
    device = cpu = 0.0
    segments: dict[tuple[int, ...], list[fx.Node]] = defaultdict(list)
    for node, facts in effects.of.items():
        if node.op not in ("call_function", "call_method"):
            continue
        times = costs.times(node, facts, _trained(node))
        device += times.forward + times.backward + _sums_bytes(node) / costs.roofline.bytes_per_ms
        cpu += times.forward_cpu + times.backward_cpu
        inside = marks[node.name].segment
        for depth in range(len(inside)):
            segments[inside[: depth + 1]].append(node)
    for members in segments.values():
        device += costs.segment(members, effects)
        cpu += costs.roofline.segment_ms + sum(costs.times(n, effects.of[n], False).forward_cpu for n in members)
    device, cpu = passes * device, passes * cpu
    for work in others:
        device += work.moved / costs.roofline.bytes_per_ms
        cpu += work.operators * costs.roofline.node_ms
    return device, cpu


def _trained(node: fx.Node) -> bool:
    return any(value.requires_grad for value in tensors_in(node.meta["val"]))


def _sums_bytes(node: fx.Node) -> int:
    """The bytes moved to add up the gradients that several users of a value send it: two read, one written each."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.requires_grad:
        return 0
    return 3 * value.nbytes * max(sum(_trained(user) for user in node.users) - 1, 0)
