"""The report of one ``optimize`` call, put together from the line that it went."""

import platform
from collections.abc import Iterator

import torch
from torch import nn

from memrewrite.costs import Costs
from memrewrite.equivalence.verifying import Verdict
from memrewrite.plan_facts.chain import compute_nodes, held_storages
from memrewrite.records.options import Budget
from memrewrite.records.outcomes import Measured, Peaks, Segment, Share
from memrewrite.records.report import Report
from memrewrite.report.curves import by_module, curve
from memrewrite.rewriting.contract import where
from memrewrite.search import pipeline
from memrewrite.search.coverage import kept
from memrewrite.simulate import Timeline, habits
from memrewrite.simulate.devices.as_cuda import NOTE
from memrewrite.version import __version__
from memrewrite.workload.step import device_type

_COMPILED = "Peaks are predicted for the model as it is, and measured for what torch.compile makes of it."


def report_on(
    line: pipeline.Line,
    result: nn.Module,
    limit: Budget | None,
    before: Timeline,
    after: Timeline,
    verdict: Verdict | None,
    measured: Measured | None,
) -> Report:
    """The record of what became of ``line``: ``result`` is its program, or the model itself, ``after`` its timeline.

    ``limit`` is the budget asked for, ``verdict`` and ``measured`` are None where nothing was verified or measured.
    """
    config = {
        "budget": None if limit is None else str(limit),
        "mode": line.step.mode,
        "amp": None if line.step.amp is None else str(line.step.amp),
        "micro_batches": line.step.micro_batches,
        "loop": str(line.step.loop),
        "input_bytes": line.inputs.bytes,
        "compiled": line.compiled,
        "front_end": ", ".join(dict.fromkeys(part.region.captured.front_end for part in line.parts)),
        "regions": [part.region.path for part in line.parts],
    }
    return Report(
        model=type(line.model).__name__,
        mode=line.step.mode,
        device=line.step.device_type(line.model, line.inputs),
        config=config,
        budget=None if limit is None else limit.resolve(limit.of(before)),
        predicted_before=_peaks(before),
        predicted_after=_peaks(after),
        rewrites=tuple((name, a.where, a.what) for name, r in line.results.items() for a in r.applied),
        refusals=tuple((name, f.where, f.reason) for name, r in line.results.items() for f in r.refused),
        freed={name: r.freed for name, r in line.results.items() if r.applied and r.freed},
        segments=_segments(line),
        equivalent=None if verdict is None else verdict.equivalent,
        verdict="not verified" if verdict is None else verdict.summary,
        checks=() if verdict is None else verdict.checks,
        curve_before=curve(before),
        curve_after=curve(after),
        modules=by_module(before, after),
        measured_after=measured,
        notes=_notes(line),
        versions=_versions(),
        shares=_shares(line),
        habits=habits.costs(line.step, after, lambda step: line.peak_of(result, step)),
        predicted_ms_before=_longer(line.original),
        predicted_ms_after=_longer(line.original if after is before else line.times()),
        reserved=limit is not None and limit.reserved,
    )


def _longer(times: tuple[float, float] | None) -> float | None:
    return None if times is None else max(times)


def _notes(line: pipeline.Line) -> tuple[str, ...]:
    if line.step.as_cuda:
        return (*line.notes, NOTE)
    compiled = line.compiled and device_type(line.model, line.inputs) == "cuda"
    return (*line.notes, _COMPILED) if compiled else line.notes


def _versions() -> dict[str, str]:
    versions = {"memrewrite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    cuda = {} if torch.version.cuda is None else {"cuda": torch.version.cuda}
    return {**versions, **cuda, "platform": f"{platform.system()} {platform.machine()}"}


def _shares(line: pipeline.Line) -> tuple[Share, ...]:
    regions = {part.region.path: "" for part in line.parts}
    if "" in regions or line.step.mode == "inference":
        return ()
    untouched = {**line.left, **regions}
    found = kept(line.model, line.inputs, line.step, untouched)
    return tuple(Share(path, size, untouched[path]) for path, size in found.items())


def _peaks(timeline: Timeline) -> Peaks:
    return Peaks(timeline.peak, timeline.peak_step1, timeline.phases, timeline.categories, timeline.reserved)


def _segments(line: pipeline.Line) -> tuple[Segment, ...]:
    return tuple(segment for part in line.parts for segment in _segments_of(part, line.costs(part)))


def _segments_of(part: pipeline.Part, costs: Costs) -> Iterator[Segment]:
    effects = part.observe()
    nodes = compute_nodes(effects)
    storages = held_storages(effects, nodes).values()
    paths = [n.meta.get("segment", ()) for n in nodes]
    for segment in sorted({path[:depth] for path in paths for depth in range(1, len(path) + 1)}):
        members = [i for i, path in enumerate(paths) if path[: len(segment)] == segment]
        made = (s for s in storages if s.saver is not None and members[0] <= s.producer <= members[-1])
        freed = sum(s.bytes for s in made if s.last_use <= members[-1])
        ms = costs.segment((nodes[i] for i in members), effects)
        yield Segment(where(nodes[members[0]]), where(nodes[members[-1]]), len(members), freed, ms, len(segment))
