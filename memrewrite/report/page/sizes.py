"""Peaks against the size of what varies, as shapes for the template; coordinates and text are as in ``chart``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memrewrite.report.axes import Tick, ticks
from memrewrite.report.page.chart import HEIGHT, WIDTH
from memrewrite.report.text import change, short_bytes

if TYPE_CHECKING:
    from memrewrite.records.report import Report


@dataclass(frozen=True)
class Dot:
    """One step's peak: where, in percent from the left and the bottom, and what the pointer is told there."""

    left: float
    bottom: float
    text: str


@dataclass(frozen=True)
class Line:
    """The peaks of one model, and the path through them."""

    name: str
    path: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class SizeChart:
    """Everything the template draws and lists: ``axis`` is what varies, ``rows`` the sizes and both peaks."""

    axis: str
    planned: int
    lines: tuple[Line, ...]
    marks: tuple[Tick, ...]
    ticks: tuple[Tick, ...]
    budget: Tick | None
    names: tuple[str, ...]
    rows: tuple[tuple[tuple[int, ...], str, str, str], ...]
    width: int = WIDTH
    height: int = HEIGHT

    def y(self, share: float) -> int:
        """The coordinate of a share of the axis' height."""
        return round(HEIGHT * (1 - share))


def size_chart(report: "Report") -> SizeChart | None:
    """The drawing of a report's peaks by size; None where it has none."""
    found = report.by_size
    if found is None or found.missing:
        return None
    axis, sizes = next(iter(found.sizes.items()))
    models = {"original": found.original, "rewritten": found.rewritten}
    known = [peak for peaks in models.values() for peak in peaks if peak is not None]
    top, at_bytes = ticks(max(report.budget or 0, *known))
    lines = tuple(_line(name, sizes, peaks, top) for name, peaks in models.items())
    marks = tuple(Tick(size / sizes[-1], str(size)) for size in sizes)
    budget = Tick(report.budget / top, short_bytes(report.budget)) if report.budget else None
    each = zip(zip(*found.sizes.values(), strict=True), found.original, found.rewritten, strict=True)
    rows = tuple((at, *_texts(before, after)) for at, before, after in each)
    return SizeChart(axis, sizes[-1], lines, marks, at_bytes, budget, tuple(found.sizes), rows)


def _texts(before: int | None, after: int) -> tuple[str, str, str]:
    if before is None:
        return "not known", short_bytes(after), ""
    return short_bytes(before), short_bytes(after), change(before, after)


def _line(name: str, sizes: tuple[int, ...], peaks: tuple[int | None, ...], top: int) -> Line:
    known = [(size / sizes[-1], peak / top, size, peak) for size, peak in zip(sizes, peaks, strict=True) if peak]
    points = (f"{round(WIDTH * x)} {round(HEIGHT * (1 - y))}" for x, y, _, _ in known)
    dots = (Dot(round(100 * x, 2), round(100 * y, 2), f"{name}, {n}: {short_bytes(peak)}") for x, y, n, peak in known)
    return Line(name, "M" + "L".join(points), tuple(dots))
