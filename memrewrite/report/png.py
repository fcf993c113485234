"""The timeline of a step as a picture, for where no page can be shown; drawn by matplotlib, the extra ``plots``."""

import importlib.util
import io
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from memrewrite.records.errors import UsageError
from memrewrite.report.axes import phases, places, ticks
from memrewrite.report.kinds import KINDS, layers
from memrewrite.report.page.sizes import SizeChart, size_chart
from memrewrite.report.text import change, module_name, operator_name, plain, short_bytes

if TYPE_CHECKING:
    from memrewrite.records.outcomes import Curve
    from memrewrite.records.report import Report
    from memrewrite.report.axes import Phase

_SIZE = 10.0, 4.2  # inches, a panel
_DPI = 144
_INK, _SOFT, _LINE, _BUDGET = "#1c2430", "#5b6675", "#d9dee5", "#c0143c"


def require() -> None:
    """Raise ``UsageError`` where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("A picture needs matplotlib; install it with pip install 'memrewrite[plots]'.")


def to_png(report: "Report") -> bytes:
    """The picture: the original above the rewritten model, on the same axes, with the budget.

    Raises ``UsageError`` without matplotlib, and for a report without curves.
    """
    require()
    from matplotlib.figure import Figure

    curves = report.curves
    if not curves:
        raise UsageError("The report has no timeline to draw; optimize the model again.")
    axis = phases(list(curves.values()))
    sizes = size_chart(report)
    top, marks = ticks(max(report.budget or 0, *(max(curve.totals) for curve in curves.values())))
    heights = [_SIZE[1] * len(curves), *([_SIZE[1]] if sizes else [])]
    whole = Figure(figsize=(_SIZE[0], sum(heights)), dpi=_DPI, layout="constrained")
    figure, *below = whole.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    panels = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, (name, curve) in zip(panels, curves.items(), strict=True):
        _draw(panel, curve, axis)
        _label(panel, curve, axis, name if len(curves) > 1 else "peak")
        _budget(panel, report.budget)
    panels[0].set(xlim=(0, 1), ylim=(0, top), yticks=[mark.at * top for mark in marks])
    panels[0].set_yticklabels([mark.text for mark in marks])
    for panel in panels:
        _frame(panel, axis)
    whole.suptitle(_title(report), x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK, parse_math=False)
    bands = {label: band for panel in panels for band, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    shown = [kind.label for kind in reversed(KINDS) if kind.label in bands]
    handles = [bands[label] for label in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    if sizes:
        _by_size(below[0].subplots(), report, sizes)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # names in any script
        whole.savefig(buffer, format="png")
    return buffer.getvalue()


def _title(report: "Report") -> str:
    before, after = report.predicted_before.peak, report.predicted_after.peak
    if not report.changed:
        return plain(f"{report.model} on {report.device}: predicted peak {short_bytes(after)}")
    peaks = f"{short_bytes(before)} to {short_bytes(after)} ({change(before, after)})"
    return plain(f"{report.model} on {report.device}: predicted peak {peaks}")


def _draw(panel: Any, curve: "Curve", axis: "Sequence[Phase]") -> None:
    at = [*places(curve, axis), 1.0]
    bottom = [0] * len(at)
    stacks = layers(curve)
    for kind in KINDS:
        sizes = stacks.get(kind.key, [0] * len(curve.moments))
        above = [low + size for low, size in zip(bottom, [*sizes, sizes[-1]], strict=True)]
        label = kind.label if any(sizes) else None
        panel.fill_between(at, bottom, above, step="post", color=kind.light, linewidth=0, label=label)
        bottom = above
    panel.step(at, bottom, where="post", color=_INK, linewidth=0.8)


def _label(panel: Any, curve: "Curve", axis: "Sequence[Phase]", name: str) -> None:
    module, operator = curve.makers[curve.made_by[curve.highest]]
    x, y = places(curve, axis)[curve.highest], curve.totals[curve.highest]
    maker = plain(f"{module_name(module)} · {operator_name(operator)}")
    side = "left" if x < 0.25 else "right" if x > 0.75 else "center"
    panel.plot([x], [y], marker="o", markersize=5, color=_INK, clip_on=False)
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": _LINE}
    style = {"fontsize": 9, "color": _INK, "ha": side, "va": "bottom", "bbox": box, "parse_math": False}
    text = f"{name} {short_bytes(y)}\n{maker}"
    panel.annotate(text, (x, y), xytext=(0, 9), textcoords="offset points", zorder=5, **style)


def _budget(panel: Any, budget: int | None) -> None:
    if budget is None:
        return
    panel.axhline(budget, color=_BUDGET, linewidth=1.6, linestyle=(0, (5, 3)), zorder=4)
    text = f"budget {short_bytes(budget)}"
    panel.annotate(
        text, (1, budget), xytext=(-4, -4), textcoords="offset points", ha="right", va="top", color=_BUDGET, fontsize=9
    )


def _by_size(panel: Any, report: "Report", sizes: SizeChart) -> None:
    """Peaks against the size of what varies, on axes of their own."""
    for line, color in zip(sizes.lines, (_SOFT, KINDS[4].light), strict=True):
        points = [(dot.left / 100 * sizes.planned, dot.bottom / 100) for dot in line.dots]
        panel.plot(*zip(*points, strict=True), marker="o", markersize=5, color=color, label=line.name, clip_on=False)
    if sizes.budget:
        panel.axhline(sizes.budget.at, color=_BUDGET, linewidth=1.6, linestyle=(0, (5, 3)))
        text, style = f"budget {sizes.budget.text}", {"color": _BUDGET, "fontsize": 9, "va": "bottom"}
        panel.annotate(text, (0, sizes.budget.at), xytext=(4, 4), textcoords="offset points", **style)
    panel.set(xlim=(0, sizes.planned), ylim=(0, 1), xticks=[mark.at * sizes.planned for mark in sizes.marks])
    panel.set_yticks([mark.at for mark in sizes.ticks], [mark.text for mark in sizes.ticks])
    kind = "reserved" if report.reserved else "peak"
    panel.set_xlabel(plain(sizes.axis), color=_SOFT, fontsize=9, parse_math=False)
    panel.set_title(f"predicted {kind} at smaller sizes", loc="left", fontsize=10, color=_INK)
    panel.legend(frameon=False, fontsize=9, loc="lower right")
    _lines(panel)


def _frame(panel: Any, axis: "Sequence[Phase]") -> None:
    _lines(panel)
    panel.set_xticks([(phase.start + phase.end) / 2 for phase in axis])
    panel.set_xticklabels(["optimizer" if phase.name == "step" else phase.name for phase in axis])
    for _, phase in pairwise(axis):
        panel.axvline(phase.start, color=_SOFT, linewidth=0.7, linestyle=(0, (2, 3)))


def _lines(panel: Any) -> None:
    """What frames every panel."""
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(_SOFT)
    panel.grid(axis="y", color=_LINE, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(length=0, colors=_SOFT, labelsize=9)
