"""What it takes to run a node, in milliseconds: measured on the device where that was done, else by a roofline.

The roofline goes over observed operations and bytes. Its CUDA figures are those of one H200: copies at 4.2 TB/s and
bf16 products at 770 TFLOP/s were measured there, 50 TFLOP/s is its float32 rate without TF32; 0.03 ms of CPU per
segment is what ``runtime.segment`` took on its host. The CPU figures are an order of magnitude.
Where some nodes of a graph were measured, the roofline of the others is scaled as those were off it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from memrewrite.observe.effects import Effects
from memrewrite.observe.node_effects import NodeEffects


@dataclass(frozen=True)
class Roofline:
    """A device's rates: bytes and floating-point operations per millisecond; fixed costs in ms."""

    bytes_per_ms: float
    flops_per_ms: float
    half_flops_per_ms: float
    node_ms: float
    segment_ms: float

    def work_ms(self, work: tuple[int, int], amp: torch.dtype | None) -> float:
        """Milliseconds for ``work`` = (floating-point operations, bytes moved) alone."""
        flops, moved = work
        return max(flops / (self.flops_per_ms if amp is None else self.half_flops_per_ms), moved / self.bytes_per_ms)

    def ms(self, work: tuple[int, int], amp: torch.dtype | None) -> float:
        """Milliseconds for a node of that ``work``; 0 for no work at all."""
        return self.node_ms + self.work_ms(work, amp) if any(work) else 0.0


ROOFLINES = {
    "cuda": Roofline(4.2e9, 5.0e10, 7.7e11, 0.005, 0.03),
    "cpu": Roofline(1.0e7, 1.0e8, 1.0e8, 0.005, 0.03),
}
_BACKWARD = 2.0  # a product has two in its backward, an elementwise operator reads its gradient besides its input


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: what its forward and the backward of its results keep the device busy.

    ``forward_cpu`` and ``backward_cpu`` are the CPU's time to start each.
    """

    forward: float
    backward: float = 0.0
    forward_cpu: float = 0.0
    backward_cpu: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a graph's nodes: ``measured`` where a node is in there, else ``scale`` times the roofline.

    ``again`` are the milliseconds of nodes that run again otherwise than in the forward pass, and save first.
    """

    roofline: Roofline
    amp: torch.dtype | None = None
    measured: Mapping[fx.Node, Times] = field(default_factory=dict)
    scale: float = 1.0
    again: Mapping[fx.Node, float] = field(default_factory=dict)

    def ms(self, node: fx.Node, facts: NodeEffects) -> float:
        """The device's time for the node's forward; exactly 0 for a node that does no work (a view)."""
        if not facts.flops and not facts.moved:
            return 0.0
        times = self.measured.get(node)
        return times.forward if times else self.scale * self.roofline.ms((facts.flops, facts.moved), self.amp)

    def again_ms(self, node: fx.Node, facts: NodeEffects) -> float:
        """The device's time for the node where its segment runs again."""
        return self.again[node] if node in self.again else self.ms(node, facts)

    def rerun_ms(self, node: fx.Node, facts: NodeEffects) -> float:
        """The part of ``again_ms`` until the node's last save, where a recomputation that stops early stops.

        Of a node that saves in the middle (a product under autocast saves the casts it makes) the part is the
        roofline's.
        """
        if node in self.again:
            return 0.0
        work = (facts.flops, facts.moved)
        if facts.rerun == work or not any(facts.rerun):
            return self.ms(node, facts) if any(facts.rerun) else 0.0
        if node not in self.measured:
            return self.scale * self.roofline.ms(facts.rerun, self.amp)
        part = self.roofline.work_ms(facts.rerun, self.amp) / self.roofline.work_ms(work, self.amp)
        return self.ms(node, facts) * part

    def times(self, node: fx.Node, facts: NodeEffects, trained: bool) -> Times:
        """All four times; for a node that was not measured, those of its backward are guessed where it is ``trained``.

        The CPU then takes the roofline's fixed time per node.
        """
        forward = self.ms(node, facts)
        if node in self.measured:
            times = self.measured[node]
            return Times(forward, times.backward, times.forward_cpu, times.backward_cpu)
        started = self.roofline.node_ms if forward else 0.0
        return Times(forward, _BACKWARD * forward * trained, started, started * trained)

    def segment(self, nodes: Iterable[fx.Node], effects: Effects) -> float:
        """Milliseconds of running the nodes again, in order, up to the last save among them."""
        total = until_save = 0.0
        for node in nodes:
            facts = effects.of[node]
            if facts.saved:
                until_save = total + self.rerun_ms(node, facts)
            total += self.again_ms(node, facts)
        return until_save


def roofline_costs(device: str, amp: torch.dtype | None) -> Costs:
    """Costs of nodes none of which was measured; ``device`` is ``"cuda"`` or ``"cpu"``."""
    return Costs(ROOFLINES[device], amp)
