"""Where a curve's moments lie on an axis that two curves share, and the ticks of its bytes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memrewrite.records.outcomes import Curve


LEAST_WIDTH = 0.08
"""What a phase takes of the axis at least, so that its name can stand below it."""
FIXED_WIDTH = {"step": 0.15}
"""What the optimizer takes: it has an operator for every parameter, and little happens."""
HEADROOM = 1.16
"""How far the axis reaches above the highest figure, for the label of the peak."""
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


@dataclass(frozen=True)
class Phase:
    """One phase of the step on the axis, from ``start`` to ``end`` between 0 and 1."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Tick:
    """A figure on the axis of bytes: where, between 0 and 1, and its text with the unit."""

    at: float
    text: str


def phases(curves: "Sequence[Curve]") -> tuple[Phase, ...]:
    """The phases that have moments, each as wide as the longer of the curves has it, ``LEAST_WIDTH`` at least."""
    lengths: dict[str, int] = {}
    for curve in curves:
        for name, start, end in _spans(curve):
            lengths[name] = max(lengths.get(name, 0), end - start)
    if lengths.get("data", 0) <= 1:  # nothing is allocated there: its end falls to the phase after it
        lengths.pop("data", None)
    shares = {name: length / max(1, sum(lengths.values())) for name, length in lengths.items()}
    widths = {name: FIXED_WIDTH.get(name, max(share, LEAST_WIDTH)) for name, share in shares.items()}
    found, at = [], 0.0
    for name, width in widths.items():
        left, at = at, at + width / sum(widths.values())
        found.append(Phase(name, left, at))
    return tuple(found)


def places(curve: "Curve", axis: Sequence[Phase]) -> tuple[float, ...]:
    """Where each moment of ``curve`` begins, between 0 and 1."""
    spans = _spans(curve)
    starts = [start for _, start, _ in spans]
    on_axis = {phase.name: phase for phase in axis}
    found = []
    for moment in curve.moments:
        name, start, end = spans[bisect_right(starts, moment) - 1]
        phase = on_axis.get(name)
        share = (moment - start) / max(1, end - start)
        found.append(phase.start + share * (phase.end - phase.start) if phase else 0.0)
    return tuple(found)


def ticks(highest: int) -> tuple[int, tuple[Tick, ...]]:
    """The top of an axis in bytes that leaves room above ``highest``, and three to six round ticks on it."""
    top = max(1, int(highest * HEADROOM))
    size, unit = next((size, unit) for size, unit in _UNITS if top >= size)
    steps = [each * 10.0**power for power in range(-1, 4) for each in (1, 2, 2.5, 5)]
    stride = next(each for each in steps if top / size / each <= 5.5)
    found = []
    for number in range(int(top / size / stride) + 1):
        found.append(Tick(number * stride * size / top, f"{number * stride:g} {unit}" if number else "0"))
    return top, tuple(found)


def _spans(curve: "Curve") -> list[tuple[str, int, int]]:
    ends = [start for _, start in curve.phases[1:]] + [curve.length]
    return [(name, start, end) for (name, start), end in zip(curve.phases, ends, strict=True)]
