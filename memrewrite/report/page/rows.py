"""The words and figures of the page: what the template puts into sentences and tables."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from memrewrite.records.options import format_bytes
from memrewrite.report.kinds import KINDS, Kind, gathered
from memrewrite.report.text import DOES_NOT_FIT, NOT_MEASURED, change, module_name, short_bytes

if TYPE_CHECKING:
    from memrewrite.records.outcomes import Check, ModuleBytes, Segment, Share
    from memrewrite.records.report import Report

_PLACE = re.compile(r"(.*) \(([^()]+:\d+)\)")
_NUMBER = re.compile(r"(?<=[a-z])_\d+\b")
_GROUPS = {
    "output": "outputs",
    "layout": "layout of outputs",
    "loss": "loss",
    "gradient": "parameter gradients",
    "input gradient": "input gradients",
    "buffer": "buffers",
    "parameter": "parameters after each step",
    "random state": "random state",
    "training flag": "training flags",
}
_MOST_MODULES = 24
_MOST_SEGMENTS = 12
F = TypeVar("F", int, float)


@dataclass(frozen=True)
class Figure:
    """One row of before against after; no ``change`` where one of them is missing."""

    name: str
    before: str
    after: str
    change: str = ""


@dataclass(frozen=True)
class Place:
    """A module and, where it is known, the line of the user's file."""

    module: str
    source: str = ""


@dataclass(frozen=True)
class Group:
    """The places of which a pass says the same."""

    name: str
    words: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Bar:
    """One module's bytes before and after, and both in per cent of the largest."""

    name: str
    before: str
    after: str
    change: str
    before_width: float
    after_width: float


@dataclass(frozen=True)
class Proof:
    """What verification says of one group of values."""

    group: str
    count: int
    passed: bool
    words: str


def headline(report: "Report") -> str:
    """The result in a sentence."""
    step = "training step" if report.mode == "train" else "forward pass"
    who = f"The {step} of {report.model} on {report.device}"
    old, new = report.measured_before, report.measured_after
    before = old.peak if old else report.predicted_before.peak
    after = new.peak if new else report.predicted_after.peak
    verb = "peaks" if new else "is predicted to peak"
    if not report.changed:
        return f"{who} {verb} at {short_bytes(after)}{_budget(report)}; nothing was to rewrite."
    instead = f"instead of {short_bytes(before)} ({change(before, after)})"
    if new and not old:
        instead = f"instead of the {short_bytes(before)} predicted for the original ({change(before, after)})"
    return f"{who} {verb} at {short_bytes(after)} {instead}{_budget(report)}."


def verdict(report: "Report") -> tuple[str, str, str]:
    """How it went (``good``, ``bad`` or ``open``), in a word, and what else there is to say."""
    if report.equivalent is None:
        return "open", "Not verified", "" if report.changed else "the model is as it was"
    word, _, rest = report.verdict.partition(": ")
    return "good" if report.equivalent else "bad", word.capitalize(), rest


def figures(report: "Report") -> list[Figure]:
    """Peak, reserved memory and step time, before against after."""
    old, new = report.measured_before, report.measured_after
    fits = not any(note.startswith("The original does not fit") for note in report.notes)
    missing = NOT_MEASURED if fits else DOES_NOT_FIT
    rows = [_bytes("Peak, predicted", report.predicted_before.peak, report.predicted_after.peak)]
    rows.append(_bytes("Peak, measured", old.peak if old else None, new.peak if new else None, missing))
    if report.device == "cuda":
        rows.append(_bytes("Reserved, predicted", report.predicted_before.reserved, report.predicted_after.reserved))
    if old or new:
        reserved = old.reserved if old else None, new.reserved if new else None
        rows.append(_bytes("Reserved, measured", *reserved, missing))
    if report.predicted_ms_before is not None or report.predicted_ms_after is not None:
        known = report.predicted_ms_before, report.predicted_ms_after
        rows.append(_ms("Step time, predicted", *known, "not predicted"))
    if old or new:
        rows.append(_ms("Step time, measured", old.step_ms if old else None, new.step_ms if new else None, missing))
    return rows


def composition(report: "Report") -> list[tuple[Kind, Figure]]:
    """The predicted peak by kind of memory, from the top of the drawing down."""
    before, after = gathered(report.predicted_before.categories), gathered(report.predicted_after.categories)
    there = [kind for kind in reversed(KINDS) if before[kind.key] or after[kind.key]]
    return [(kind, _bytes(kind.label, before[kind.key], after[kind.key], short=True)) for kind in there]


def total(report: "Report") -> Figure:
    """The predicted peak, below what it is made of."""
    return _bytes("peak", report.predicted_before.peak, report.predicted_after.peak, short=True)


def phase_ends(report: "Report") -> list[tuple[str, list[str]]]:
    """Bytes in use as each phase ends: predicted before and after, and measured where that was done."""
    columns = [report.predicted_before.phases, report.predicted_after.phases]
    columns += [m.phases for m in (report.measured_before, report.measured_after) if m is not None]
    per_step = len(columns[0]) // 2 or 1
    rows = []
    for index, (name, _) in enumerate(columns[0]):
        sizes = [short_bytes(column[index][1]) if index < len(column) else "" for column in columns]
        rows.append((f"step {index // per_step + 1}, {name}", sizes))
    return rows


def modules(rows: "Iterable[ModuleBytes]") -> list[Bar]:
    """Bytes of activations by module, most first, at the deepest level that still gives a short table."""
    rows = list(rows)
    depths = range(max((len((row.path or "").split(".")) for row in rows), default=0), 0, -1)
    tables = (_summed(rows, depth) for depth in depths)
    table = next((t for t in tables if len(t) <= _MOST_MODULES), _summed(rows, 1))
    return _bars(table)[:_MOST_MODULES]


def every_module(rows: "Iterable[ModuleBytes]") -> list[Bar]:
    """The same for every module on its own."""
    return _bars({row.path: (row.before, row.after) for row in rows})


def segments(found: "Iterable[Segment]") -> "tuple[list[Segment], list[Segment]]":
    """The segments that free most, and the others where there are many; most bytes first."""
    ordered = sorted(found, key=lambda segment: -segment.saved_bytes)
    shown = len(ordered) if len(ordered) <= _MOST_SEGMENTS + 2 else _MOST_SEGMENTS
    return ordered[:shown], ordered[shown:]


def groups(found: Iterable[tuple[str, str, str]]) -> list[Group]:
    """Rewrites or refusals by pass and words, the most frequent first; segments have a table of their own.

    Words that differ by the numbers of the graph's nodes alone (``linear_1``) are the same.
    """
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    words: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, where, said in found:
        if name != "checkpoint_segments":
            key = name, _NUMBER.sub("", said)
            places[key].append(place(where))
            words[key].add(said)
    texts = {key: said.pop() if len(said) == 1 else key[1] for key, said in words.items()}
    each = (Group(key[0], texts[key], tuple(found_at)) for key, found_at in places.items())
    return sorted(each, key=lambda group: -len(group.places))


def place(where: str) -> Place:
    """The module and the source line that a text such as ``blocks.0 (model.py:12)`` names."""
    match = _PLACE.fullmatch(where)
    return Place(module_name(match[1]), match[2]) if match else Place(module_name(where))


def untouched(report: "Report") -> list[tuple[str, str, str]]:
    """Path, share of the activations and reason of what stays as it is."""
    kept = sum(share.kept_bytes for share in report.shares) or 1
    return [_share(share, kept) for share in report.shares if share.untouched]


def open_parts(report: "Report") -> str:
    """Which parts were open to rewrites, where nothing is known to stay as it is."""
    regions = list(report.config.get("regions", [""]))
    if regions == [""]:
        return "Nothing had to: the model was captured whole."
    named = ", ".join(map(module_name, regions)) or "no part of it"
    return f"The model was not captured whole. Open to rewrites: {named}; the rest runs as it is."


def proofs(checks: "Iterable[Check]") -> list[Proof]:
    """One row for each group of values."""
    return [Proof(_GROUPS.get(c.group, c.group), c.count, c.passed, _words(c)) for c in checks]


def notes(report: "Report") -> list[str]:
    """What else is to be said, with why peaks by size were looked for and are not drawn."""
    return [*report.notes, *([report.by_size.missing] if report.by_size and report.by_size.missing else [])]


def environment(report: "Report") -> list[tuple[str, str]]:
    """What the figures hold for: device, versions, the step and the command."""
    measured = report.measured_after or report.measured_before
    config = {name.replace("_", " "): value for name, value in report.config.items()}
    config = {k: ", ".join(map(str, v)) if isinstance(v, list | tuple) else v for k, v in config.items()}
    rows = [("device", measured.device if measured else report.device), *(report.versions or {}).items()]
    rows += [(name, str(value)) for name, value in config.items() if value not in (None, "")]
    return rows


def _budget(report: "Report") -> str:
    if report.budget is None:
        return ""
    what = f" and reserves {short_bytes(report.held)}" * report.reserved
    if report.held <= report.budget:
        return f"{what}, within the budget of {short_bytes(report.budget)}"
    return f"{what}, {short_bytes(report.held - report.budget)} over the budget of {short_bytes(report.budget)}"


def _bytes(name: str, before: int | None, after: int | None, missing: str = "", *, short: bool = False) -> Figure:
    text = short_bytes if short else format_bytes
    return _figure(name, before, after, text, missing)


def _ms(name: str, before: float | None, after: float | None, missing: str) -> Figure:
    return _figure(name, before, after, lambda ms: f"{ms:.1f} ms", missing)


def _figure(name: str, before: F | None, after: F | None, text: Callable[[F], str], missing: str) -> Figure:
    """``missing`` says why there is no figure for the original; the rewritten one's was then not looked for, either."""
    old = missing if before is None else text(before)
    new = (missing if missing != DOES_NOT_FIT else NOT_MEASURED) if after is None else text(after)
    return Figure(name, old, new, "" if before is None or after is None else change(before, after))


def _summed(rows: "list[ModuleBytes]", depth: int) -> dict[str | None, tuple[int, int]]:
    table: dict[str | None, tuple[int, int]] = {}
    for row in rows:
        path = row.path if row.path is None else ".".join(row.path.split(".")[:depth])
        before, after = table.get(path, (0, 0))
        table[path] = before + row.before, after + row.after
    return table


def _bars(table: dict[str | None, tuple[int, int]]) -> list[Bar]:
    most = max((max(pair) for pair in table.values()), default=0) or 1
    ordered = sorted(table.items(), key=lambda item: -max(item[1]))
    return [
        Bar(
            module_name(path),
            short_bytes(before),
            short_bytes(after),
            change(before, after),
            round(100 * before / most, 2),
            round(100 * after / most, 2),
        )
        for path, (before, after) in ordered
    ]


def _share(share: "Share", kept: int) -> tuple[str, str, str]:
    return share.path or "everything else", f"{100 * share.kept_bytes / kept:.1f} %", share.untouched


def _words(check: "Check") -> str:
    if check.bit_equal == check.count:
        return "bit-equal"
    some = f"{check.bit_equal} of {check.count} bit-equal; " if check.bit_equal else ""
    if check.error is None:
        return f"{some}{check.worst} is missing, of another form or not finite in one of the two models"
    own = f"the original's own {check.own_error:.2g}, " if check.own_error else ""
    return f"{some}worst {check.worst}: error {check.error:.2g}, {own}allowed {check.allowed or 0:.2g}"
