"""The report of one ``optimize`` call, put together from the candidate that it chose."""

import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memrewrite.capture.origin import origin
from memrewrite.costs import Costs
from memrewrite.equivalence.verdict import Verdict
from memrewrite.plan_facts.chain import compute_nodes, held_storages
from memrewrite.records.options import Budget
from memrewrite.records.outcomes import Measured, Peaks, Segment, Share
from memrewrite.records.report import Report
from memrewrite.report.curves import by_module, curve
from memrewrite.runtime.guards import hooks_of
from memrewrite.search.candidate import Candidate, CandidateRegion
from memrewrite.search.coverage import kept
from memrewrite.simulate import Timeline, habits
from memrewrite.torch_internals.spread import spreads
from memrewrite.version import __version__
from memrewrite.workload.step import device_type

_SENT_AGAIN = (
    "{count} calls of layers that are divided among processes stand in segments and run again; what these send before "
    "they are through with what backward takes is sent again, as no result of a collective is kept in a segment."
)


def report_on(
    candidate: Candidate,
    result: nn.Module,
    limit: Budget | None,
    before: Timeline,
    after: Timeline,
    verdict: Verdict | None,
    measured: Measured | None,
) -> Report:
    """The record of what became of a model: ``result`` is the candidate built, or that itself.

    ``limit`` is the budget asked for, ``after`` is the timeline of ``result``; ``verdict`` and
    ``measured`` are None where nothing was verified or measured.
    """
    bench = candidate.bench
    return Report(
        model=type(bench.model).__name__,
        mode=bench.step.mode,
        device=bench.step.device_type(bench.model, bench.inputs),
        config=_config(candidate, limit),
        budget=None if limit is None else limit.resolve(limit.of(before)),
        predicted_before=_peaks(before),
        predicted_after=_peaks(after),
        rewrites=tuple((name, a.where, a.what) for name, r in candidate.results.items() for a in r.applied),
        refusals=tuple((name, f.where, f.reason) for name, r in candidate.results.items() for f in r.refused),
        freed={name: r.freed for name, r in candidate.results.items() if r.applied and r.freed},
        segments=_segments(candidate),
        equivalent=None if verdict is None else verdict.equivalent,
        verdict="not verified" if verdict is None else verdict.summary,
        checks=() if verdict is None else verdict.checks,
        curve_before=curve(before),
        curve_after=curve(after),
        modules=by_module(before, after),
        measured_after=measured,
        notes=_notes(candidate),
        versions=_versions(),
        shares=_shares(candidate),
        habits=habits.costs(bench.step, after, lambda step: candidate.peak_of(result, step)),
        predicted_ms_before=_longer(bench.original),
        predicted_ms_after=_longer(bench.original if after is before else candidate.times()),
        reserved=limit is not None and limit.reserved,
    )


def _config(candidate: Candidate, limit: Budget | None) -> dict[str, Any]:
    """What was asked for."""
    bench = candidate.bench
    return {
        "budget": None if limit is None else str(limit),
        "mode": bench.step.mode,
        "amp": None if bench.step.amp is None else str(bench.step.amp),
        "micro_batches": bench.step.micro_batches,
        "loop": str(bench.step.loop),
        "mesh": None if bench.step.mesh is None else str(bench.step.mesh),
        "input_bytes": bench.inputs.bytes,
        "compiled": bench.target.compiles,
        "front_end": ", ".join(dict.fromkeys(region.region.captured.front_end for region in candidate.regions)),
        "regions": [region.region.path for region in candidate.regions],
        "dynamic": [str(each) for region in candidate.regions for each in region.region.captured.inputs.asked],
    }


def _longer(times: tuple[float, float] | None) -> float | None:
    return None if times is None else max(times)


def _notes(candidate: Candidate) -> tuple[str, ...]:
    bench = candidate.bench
    again = sum(map(_sent_again, candidate.regions)) if bench.step.divides_layers else 0
    sent = (_SENT_AGAIN.format(count=again),) if again else ()
    return (*candidate.notes, *sent, *bench.target.notes(device_type(bench.model, bench.inputs)))


def _sent_again(region: CandidateRegion) -> int:
    """How many calls of layers that are divided among processes stand in segments."""
    graph_module = region.graph.graph_module
    calls = (n for n in graph_module.graph.nodes if n.op == "call_module" and region.marks[n.name].segment)
    modules = (graph_module.get_submodule(str(node.target)) for node in calls)
    return sum(any(spreads(hook) for inner in module.modules() for hook in hooks_of(inner)) for module in modules)


def _versions() -> dict[str, str]:
    versions = {"memrewrite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    cuda = {} if torch.version.cuda is None else {"cuda": torch.version.cuda}
    return {**versions, **cuda, "platform": f"{platform.system()} {platform.machine()}"}


def _shares(candidate: Candidate) -> tuple[Share, ...]:
    regions = {region.region.path: "" for region in candidate.regions}
    if "" in regions or candidate.bench.step.mode == "inference":
        return ()
    untouched = {**candidate.left, **regions}
    found = kept(candidate.bench.model, candidate.bench.inputs, candidate.bench.step, untouched)
    return tuple(Share(path, size, untouched[path]) for path, size in found.items())


def _peaks(timeline: Timeline) -> Peaks:
    return Peaks(
        timeline.peak,
        timeline.peak_step1,
        timeline.phases,
        timeline.categories,
        timeline.reserved,
    )


def _segments(candidate: Candidate) -> tuple[Segment, ...]:
    return tuple(segment for region in candidate.regions for segment in _segments_of(region, candidate.costs(region)))


def _segments_of(region: CandidateRegion, costs: Costs) -> Iterator[Segment]:
    effects = region.effects
    nodes = compute_nodes(effects)
    storages = held_storages(effects, nodes).values()
    paths = list(region.marks.segments(n.name for n in nodes))
    for segment in sorted({path[:depth] for path in paths for depth in range(1, len(path) + 1)}):
        members = [i for i, path in enumerate(paths) if path[: len(segment)] == segment]
        made = (s for s in storages if s.saver is not None and members[0] <= s.producer <= members[-1])
        freed = sum(s.bytes for s in made if s.last_use <= members[-1])
        ms = costs.segment((nodes[i] for i in members), effects)
        first, last = (str(origin(nodes[i])) for i in (members[0], members[-1]))
        yield Segment(first, last, len(members), freed, ms, len(segment))
