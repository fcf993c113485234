"""From a timeline to what a report says of it: a curve of few points with the same maximum, and bytes by module."""

import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memrewrite.records.outcomes import Curve, ModuleBytes
from memrewrite.simulate import ACTIVATIONS, Timeline

POINTS = 1000
_LABEL = re.compile(r"step (\d+) (\w+)(?:: (.*)| ends)")


def curve(timeline: Timeline, points: int = POINTS) -> Curve:
    """The last step of ``timeline`` at no more than ``points`` moments, the peak and every phase's ends among them."""
    labels = [_parsed(label) for _, label in timeline.events]
    first = next(i for i, (step, _, _) in enumerate(labels) if step == labels[-1][0])
    table = _by_category(timeline)
    starts: dict[str, int] = {}
    for moment, (_, phase, _) in enumerate(labels[first:]):
        starts.setdefault(phase, moment)
    totals = sum(table.values(), np.zeros(len(labels), dtype=np.int64))[first:]
    kept = thinned(totals, list(starts.values()), points)
    makers: dict[tuple[str | None, str], int] = {}
    made_by = []
    for moment in kept:
        maker = timeline.modules[first + moment], labels[first + moment][2]
        made_by.append(makers.setdefault(maker, len(makers)))
    used = {name: row for name, row in table.items() if row[first:].any()}
    return Curve(
        length=len(labels) - first,
        phases=tuple(starts.items()),
        moments=tuple(kept),
        bytes={name: tuple(int(row[first + moment]) for moment in kept) for name, row in used.items()},
        makers=tuple(makers),
        made_by=tuple(made_by),
    )


def thinned(totals: NDArray[np.int64], starts: list[int], points: int) -> list[int]:
    """The numbers of at most ``points`` of ``totals``: the ends of each phase, and extremes of stretches between."""
    count = len(totals)
    if count <= points:
        return list(range(count))
    kept = {0, count - 1, *starts, *(start - 1 for start in starts if start), int(totals.argmax())}
    edges = np.linspace(0, count, (points - len(kept)) // 2 + 1).astype(int)
    for a, b in pairwise(edges):
        if b > a:
            kept |= {int(a + totals[a:b].argmax()), int(a + totals[a:b].argmin())}
    return sorted(kept)


def activations(timeline: Timeline) -> dict[str | None, int]:
    """Bytes of activations by the module that made them, as the last forward ends; in inference at the peak."""
    labels = [label for _, label in timeline.events]
    training = any(label.endswith("backward ends") for label in labels)
    ends = [i for i, label in enumerate(labels) if label.endswith("forward ends")]
    moment = ends[-1] if training else timeline.peak_event
    found: dict[str | None, int] = defaultdict(int)
    for life in timeline.living(moment):
        if life.category == ACTIVATIONS:
            found[life.module] += life.bytes
    return dict(found)


def by_module(before: Timeline, after: Timeline) -> tuple[ModuleBytes, ...]:
    """The activations of every module in two timelines, most bytes first."""
    old, new = activations(before), activations(after)
    rows = (ModuleBytes(path, old.get(path, 0), new.get(path, 0)) for path in {**old, **new})
    return tuple(sorted(rows, key=lambda row: -max(row.before, row.after)))


def _parsed(label: str) -> tuple[str, str, str]:
    """Step, phase and operator of an event's label."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return "", "", label
    return match[1], match[2], match[3] or f"{match[2]} ends"


def _by_category(timeline: Timeline) -> dict[str, NDArray[np.int64]]:
    """Bytes in use at every event by category; at the peak's event they sum to the peak, which is never less."""
    table = timeline.split()
    for name, size in timeline.categories.items():
        table.setdefault(name, np.zeros(len(timeline.events), dtype=np.int64))[timeline.peak_event] = size
    for name in table.keys() - timeline.categories.keys():
        table[name][timeline.peak_event] = 0
    return table
