"""The timeline of a step as shapes: what the template puts into SVG, and what the pointer asks for.

Coordinates are ``WIDTH`` by ``HEIGHT`` units, stretched to whatever room the page has; text is no part of the drawing,
so that it keeps its size: it is placed by percent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memrewrite.report.axes import Phase, Tick, phases, places, ticks
from memrewrite.report.kinds import KINDS, Kind, layers
from memrewrite.report.text import module_name, operator_name, plain, short_bytes

if TYPE_CHECKING:
    from memrewrite.records.outcomes import Curve
    from memrewrite.records.report import Report

WIDTH, HEIGHT = 2000, 1000
_LABELS = {kind.key: kind.label for kind in KINDS}
_CROWDED = 16  # per cent of the axis: labels of two peaks nearer than this would overlap
_APART = 80  # per cent of the axis: side by side, two labels may need that much on a telephone
_DROP = 24  # per cent of the axis by which one of them then hangs below its peak
# Where the budget's label may stand, as it needs on a telephone: from left to right, from below to above its line.
_PLACES = {
    "end below": (76, 100, -8, 0),
    "start above": (0, 24, 0, 8),
    "end above": (76, 100, 0, 8),
    "start below": (0, 24, -8, 0),
}


@dataclass(frozen=True)
class Peak:
    """The label of a curve's highest point: where, in percent from the left and the bottom, and its lines of text."""

    left: float
    bottom: float
    size: str
    maker: str
    below: bool = False

    @property
    def label_bottom(self) -> float:
        """Where the label stands, in percent from the bottom."""
        return self.bottom - _DROP if self.below else self.bottom

    @property
    def side(self) -> str:
        """Where the label hangs, so that it stays on the drawing."""
        return "start" if self.left < 30 else "end" if self.left > 70 else "middle"


@dataclass(frozen=True)
class Drawn:
    """One curve: ``areas`` are (key of the kind, path) from the top down, each painted over the one before.

    ``heights`` are in percent from the bottom.
    """

    name: str
    areas: tuple[tuple[str, str], ...]
    outline: str
    silhouette: str
    heights: tuple[float, ...]
    peak: Peak
    points: dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """Everything the template draws. ``curves`` has the rewritten model's curve last, or one where nothing changed."""

    curves: tuple[Drawn, ...]
    phases: tuple[Phase, ...]
    ticks: tuple[Tick, ...]
    kinds: tuple[Kind, ...]
    budget: Tick | None
    budget_place: str
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def points(self) -> dict[str, Any]:
        """What lies under the pointer, for the page's script."""
        return {
            "width": WIDTH,
            "phases": [{"name": phase.name, "start": self.x(phase.start)} for phase in self.phases],
            "curves": [curve.points for curve in self.curves],
        }

    def y(self, share: float) -> int:
        """The coordinate of a share of the axis' height."""
        return round(HEIGHT * (1 - share))

    def x(self, share: float) -> int:
        """The coordinate of a share of the axis' width."""
        return round(WIDTH * share)


def chart(report: "Report") -> Chart | None:
    """The drawing of a report's curves; None where it has none."""
    curves = report.curves
    if not curves:
        return None
    axis = phases(list(curves.values()))
    top, marks = ticks(max(report.budget or 0, *(max(curve.totals) for curve in curves.values())))
    drawn = [_drawn(name, curve, axis, top) for name, curve in curves.items()]
    if len(drawn) == 2:
        drawn[1] = _apart(*drawn)
    used = {key for each in drawn for key, _ in each.areas}
    budget = Tick(report.budget / top, short_bytes(report.budget)) if report.budget else None
    kinds = tuple(kind for kind in KINDS if kind.key in used)
    return Chart(tuple(drawn), axis, marks, kinds, budget, _freest(drawn, 100 * budget.at) if budget else "")


def _drawn(name: str, curve: "Curve", axis: Sequence[Phase], top: int) -> Drawn:
    at = places(curve, axis)
    xs = [round(WIDTH * share) for share in at]
    areas, sums = [], [0] * len(xs)
    kinds = layers(curve)
    for key, sizes in kinds.items():
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
        areas.append((key, _area(xs, sums, top)))
    heights = tuple(round(100 * size / top, 2) for size in sums)
    highest = curve.highest
    maker = " · ".join(_named(*curve.makers[curve.made_by[highest]]))
    peak = Peak(round(100 * at[highest], 2), heights[highest], short_bytes(sums[highest]), maker)
    points = {
        "name": name,
        "x": xs,
        "total": sums,
        "kinds": [[_LABELS[key], sizes] for key, sizes in reversed(kinds.items())],
        "by": curve.made_by,
        "makers": [_named(path, operator) for path, operator in curve.makers],
    }
    outline, silhouette = f"M{_steps(xs, sums, top)}", _area(xs, sums, top)
    return Drawn(name, tuple(reversed(areas)), outline, silhouette, heights, peak, points)


def _named(path: str | None, operator: str) -> tuple[str, str]:
    return plain(module_name(path)), plain(operator_name(operator))


def _apart(original: Drawn, rewritten: Drawn) -> Drawn:
    """The rewritten curve, its label below its peak where it would cover the original's."""
    near = original.peak.bottom - rewritten.peak.bottom < _CROWDED
    if near and abs(original.peak.left - rewritten.peak.left) < _APART:
        return replace(rewritten, peak=replace(rewritten.peak, below=True))
    return rewritten


def _freest(drawn: Sequence[Drawn], budget: float) -> str:
    """The place for the budget's label, at ``budget`` per cent, that the fewest lines and labels of peaks cross."""

    def crossed(place: str) -> int:
        left, right, low, high = _PLACES[place]
        return sum(_crossings(curve, (left, right, budget + low, budget + high)) for curve in drawn)

    return min(_PLACES, key=crossed)


def _crossings(curve: Drawn, box: tuple[float, float, float, float]) -> int:
    """How many points of a curve lie in a box, in percent; its label counts for more than all of them."""
    left, right, low, high = box
    line = zip(curve.points["x"], curve.heights, strict=True)
    points = sum(left <= 100 * x / WIDTH <= right and low <= y <= high for x, y in line)
    label = curve.peak.label_bottom
    covered = left - 25 < curve.peak.left < right + 25 and label < high and low < label + _CROWDED
    return points + WIDTH * covered


def _area(xs: Sequence[int], sizes: Sequence[int], top: int) -> str:
    return f"M{xs[0]} {HEIGHT}L{_steps(xs, sizes, top)}V{HEIGHT}Z"


def _steps(xs: Sequence[int], sizes: Sequence[int], top: int) -> str:
    """A line that holds each figure until the next moment, without what would not be seen."""
    ys = [round(HEIGHT * (1 - size / top)) for size in sizes]
    parts = [f"{xs[0]} {ys[0]}"]
    for (x, y), before in zip(zip(xs[1:], ys[1:], strict=True), ys, strict=False):
        if y != before:
            parts.append(f"H{x}V{y}")
    return "".join([*parts, f"H{WIDTH}"])
