"""What it takes to run a node again, in milliseconds, by a roofline over observed operations and bytes.

Only ratios between nodes and the fixed cost of a segment decide a plan. The CUDA figures are those of one H200: copies
at 4.2 TB/s and bf16 products at 770 TFLOP/s were measured there, 50 TFLOP/s is its float32 rate without TF32; 0.18 ms
of CPU per segment is what ``torch.utils.checkpoint`` took on its host (150-200 us). The CPU figures are an order of
magnitude.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Roofline:
    """A device's rates: bytes and floating-point operations per millisecond; fixed costs in ms."""

    bytes_per_ms: float
    flops_per_ms: float
    half_flops_per_ms: float
    node_ms: float
    segment_ms: float


ROOFLINES = {
    "cuda": Roofline(4.2e9, 5.0e10, 7.7e11, 0.005, 0.18),
    "cpu": Roofline(1.0e7, 1.0e8, 1.0e8, 0.005, 0.15),
}


def node_ms(work: tuple[int, int], device: str, amp: torch.dtype | None) -> float:
    """Milliseconds for ``work`` = (floating-point operations, bytes moved); 0 for no work at all."""
    flops, moved = work
    if not flops and not moved:
        return 0.0
    roofline = ROOFLINES[device]
    rate = roofline.flops_per_ms if amp is None else roofline.half_flops_per_ms
    return roofline.node_ms + max(flops / rate, moved / roofline.bytes_per_ms)
