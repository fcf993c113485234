"""The result of one ``optimize`` call as text for a terminal of 80 columns.

Names of layers and reasons come from foreign code, so they are printed without markup and without control characters.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memrewrite.records.options import format_bytes
from memrewrite.records.outcomes import HabitCost
from memrewrite.records.report import Report
from memrewrite.report.option_table import option_table
from memrewrite.report.printed import printed
from memrewrite.report.text import DOES_NOT_FIT, NOT_MEASURED, plain

_SEGMENTS = "checkpoint_segments"
_EXPENSIVE = 1.1  # times the original's step, where other ways to fit are worth a look


def show(
    report: Report, console: Console, *, verbose: bool = False, written: Path | None = None, fits: bool = True
) -> None:
    """Print the report: peaks, step time, rewrites and refusals (all with ``verbose``, else counted), the verdict.

    ``fits`` False says that the original ran out of memory, which is why it has no measured figures.
    """
    hint = " (give -o DIR to save the rewritten model)" if report.changed else ""
    saved = _text(f"Written: {written or 'nothing' + hint}")
    parts = Group(*_parts(report, verbose, fits), saved)
    console.print(parts, markup=False, highlight=False, emoji=False)


def text(report: Report) -> str:
    """The same where nothing was to be written."""
    return printed(_parts(report, False, True))


def over_budget(report: Report) -> bool:
    """Whether the rewritten model was measured and needs more than the budget."""
    return report.budget is not None and report.measured_after is not None and report.held > report.budget


def _parts(report: Report, verbose: bool, fits: bool) -> Iterator[RenderableType]:
    kind = " reserved" * report.reserved
    asked = report.config.get("budget") if report.budget is None else f"{format_bytes(report.budget)}{kind}"
    budget = f"budget {asked}" if asked else "no budget"
    mesh = f", each process of {report.config['mesh']}" if report.config.get("mesh") else ""
    yield Text(plain(f"{report.model}: {report.mode} step on {report.device}, {budget}{mesh}"), style="bold")
    yield _peaks(report, fits)
    yield from habit_costs(report.habits, str(report.config.get("loop")))
    if sizes := report.config.get("dynamic"):
        yield _text(f"Sizes that vary: {', '.join(sizes)}")
    yield Text()
    if report.changed:
        yield from _shares(report, verbose)
        yield from _rewrites(report, verbose)
        yield Text(plain(f"Equivalence: {report.verdict}"), style="red" if report.equivalent is False else "")
    else:
        yield Text("Nothing was to rewrite: the model is returned unchanged.")
    if report.refusals and verbose:
        yield Text()
    if report.refusals:
        yield from _refusals(report, verbose)
    if report.budget is not None:
        yield _budget(report)
        yield from _advice(report)
    yield from _by_size(report)
    for note in report.notes:
        yield _text(f"Note: {note}")


def _peaks(report: Report, fits: bool) -> Table:
    rows = table("", "original", "rewritten", "change")
    before, after = report.predicted_before.peak, report.predicted_after.peak
    rows.add_row("predicted peak", format_bytes(before), format_bytes(after), change(before, after))
    if report.device == "cuda":
        before, after = report.predicted_before.reserved, report.predicted_after.reserved
        rows.add_row("predicted reserved", format_bytes(before), format_bytes(after), change(before, after))
    old, new = report.measured_before, report.measured_after
    missing = NOT_MEASURED if fits else DOES_NOT_FIT
    peaks = [format_bytes(old.peak) if old else missing, format_bytes(new.peak) if new else NOT_MEASURED]
    rows.add_row("measured peak", *peaks, change(old.peak if old else None, new.peak if new else None))
    known = report.predicted_ms_before, report.predicted_ms_after
    if known != (None, None):
        rows.add_row("predicted step time", *_times(*known, "not predicted", "not predicted"))
    if old or new:
        before_ms, after_ms = (each.step_ms if each else None for each in (old, new))
        rows.add_row("measured step time", *_times(before_ms, after_ms, missing, NOT_MEASURED))
    return rows


def habit_costs(habits: Iterable[HabitCost], loop: str) -> Iterator[RenderableType]:
    """What the loop keeps, with what it costs at the peak."""
    costs = ", ".join(f"{habit.words} {format_bytes(habit.bytes)}" for habit in habits)
    if costs:
        yield _text(f"Of the predicted peak, the loop ({loop}) takes: {costs}")


def _by_size(report: Report) -> Iterator[RenderableType]:
    """The predicted peaks where what varies is smaller than planned for, if they are known."""
    found = report.by_size
    if found is None:
        return
    if found.missing:
        yield _text(found.missing)
        return
    yield Text(f"\nPredicted {'reserved' if report.reserved else 'peak'} by size:")
    rows = table(*found.sizes, "original", "rewritten", "change")
    for *at, before, after in zip(*found.sizes.values(), found.original, found.rewritten, strict=True):
        known = "not known" if before is None else format_bytes(before)
        rows.add_row(*map(str, at), known, format_bytes(after or 0), change(before, after))
    yield rows
    yield Text()


def _times(before: float | None, after: float | None, missing_before: str, missing_after: str) -> tuple[str, str, str]:
    """Two times in ms, or what to say for want of one, and by how much the second is longer."""
    first = missing_before if before is None else f"{before:.1f} ms"
    second = missing_after if after is None else f"{after:.1f} ms"
    return first, second, ratio(before, after)


def change(before: float | None, after: float | None) -> str:
    """By how many per cent ``after`` is more than ``before``; empty where one is not known."""
    return f"{100 * (after - before) / before:+.1f} %" if before and after is not None else ""


def ratio(before: float | None, after: float | None) -> str:
    """How many times ``before`` ``after`` is; empty where one is not known."""
    return f"x{after / before:.2f}" if before and after is not None else ""


def _shares(report: Report, verbose: bool) -> Iterator[RenderableType]:
    if not report.shares:
        return
    kept = sum(share.kept_bytes for share in report.shares)
    regions = sum(not share.untouched for share in report.shares)
    percent = f"{100 * report.captured_share:.1f} %"
    yield Text(f"Regions: {regions}, with {percent} of the {format_bytes(kept)} of activations that forward keeps")
    untouched = [share for share in report.shares if share.untouched and (verbose or share.kept_bytes)]
    if untouched:
        rows = table("untouched", "of the activations", "because")
        for share in untouched:
            part = 100 * share.kept_bytes / kept if kept else 0.0
            rows.add_row(_text(share.path or "all else"), f"{part:.1f} %", _text(share.untouched))
        yield rows


def _rewrites(report: Report, verbose: bool) -> Iterator[RenderableType]:
    if report.rewrites and verbose:
        rows = table("pass", "where", "rewrite")
        for name, where, what in report.rewrites:
            if not (report.segments and name == _SEGMENTS):  # they have a table of their own
                rows.add_row(_text(name), _text(where), _text(what))
        if rows.row_count:
            yield rows
            yield Text()
    elif report.rewrites:
        counts = Counter(name for name, _, _ in report.rewrites)
        yield _text("Rewrites: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if report.segments:
        saved = report.freed_by_segments
        rerun = sum(segment.rerun_ms for segment in report.segments)
        yield Text(f"Checkpoint segments: {len(report.segments)}, free {format_bytes(saved)}, run again {rerun:.1f} ms")
    if report.segments and verbose:
        reach = "reach the lowest peak" if report.budget is None else "free enough for the budget in the least time"
        yield Text(f"A segment keeps what enters it and runs again in backward; these {reach} found:")
        yield _segments(report)
        yield Text()
    if verbose and not report.segments and report.held <= (report.budget or 0):
        yield Text("Checkpoint segments: none; the predicted peak fits the budget without them")


def _segments(report: Report) -> Table:
    rows = table("segment", "nodes", "frees", "runs again", "frees per ms")
    for part in report.segments:
        rate = format_bytes(round(part.saved_bytes / part.rerun_ms)) if part.rerun_ms else "costs nothing"
        names = f"{part.first} .. {part.last}"
        size, time = format_bytes(part.saved_bytes), f"{part.rerun_ms:.2f} ms"
        rows.add_row(_text(names), str(part.nodes), size, time, rate.partition(" (")[0])
    return rows


def _refusals(report: Report, verbose: bool) -> Iterator[RenderableType]:
    if verbose:
        rows = table("pass", "where", "left alone because")
        for name, where, reason in report.refusals:
            rows.add_row(_text(name), _text(where), _text(reason))
    else:
        rows = table("pass", "places", "left alone because")
        for (name, reason), count in Counter((name, reason) for name, _, reason in report.refusals).most_common():
            rows.add_row(_text(name), str(count), _text(reason))
    yield rows


def _budget(report: Report) -> Text:
    budget = report.budget or 0
    kind = f"{'measured' if report.measured_after else 'predicted'}{' reserved' * report.reserved}"
    peak = report.held
    if peak <= budget:
        return Text(f"Budget: the {kind} peak fits with {format_bytes(budget - peak)} to spare", style="green")
    return Text(f"Budget: the {kind} peak is over by {format_bytes(peak - budget)}", style="red")


def _advice(report: Report) -> Iterator[RenderableType]:
    """What else would fit; where that was not asked for and the rewritten step is much slower, how to ask."""
    if report.options:
        yield Text("\nWhat else was tried for the model as it is:")
        yield option_table(report.options)
        yield Text()
        return
    measured = [each and each.step_ms for each in (report.measured_before, report.measured_after)]
    before, after = measured if all(measured) else (report.predicted_ms_before, report.predicted_ms_after)
    if report.changed and before and after and after > _EXPENSIVE * before:
        yield Text(f"A step takes {ratio(before, after)} of its time; --advise lists what else would fit.")


def _text(foreign: str) -> Text:
    return Text(plain(foreign))


def table(*columns: str, numbers: bool = False) -> Table:
    """An empty table without lines; with ``numbers``, all but the first column stand to the right."""
    rows = Table(box=None, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        rows.add_column(column, overflow="fold", no_wrap=False, justify="right" if numbers and index else "left")
    return rows
