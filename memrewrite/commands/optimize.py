"""``memrewrite optimize``: optimize, measure, save, report; with ``--check``, only predict."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from torch import nn

from memrewrite import advice
from memrewrite.artifact.recheck import verify_in_child
from memrewrite.artifact.save import save
from memrewrite.cache.store import store_in
from memrewrite.commands import job as jobs
from memrewrite.commands import together
from memrewrite.commands.answer import Outcome, say
from memrewrite.commands.launched import is_first, processes
from memrewrite.commands.progress import Stages
from memrewrite.commands.requests import OptimizeRequest
from memrewrite.commands.signals import Ended
from memrewrite.measurement.measuring import Loader, measure_in_child
from memrewrite.measurement.original import simulate_original
from memrewrite.optimizing import run as optimizing
from memrewrite.optimizing.by_size import by_size
from memrewrite.optimizing.ranks import planned
from memrewrite.optimizing.request import Request
from memrewrite.records.errors import DoesNotFitError, InternalError
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.records.options import Budget, format_bytes
from memrewrite.records.outcomes import Measured, Option
from memrewrite.records.report import Report
from memrewrite.report import png, tables
from memrewrite.report.code_diff import code_diff
from memrewrite.report.snapshot import to_pickle
from memrewrite.report.writing import fill
from memrewrite.runtime.dropin import programs
from memrewrite.search.fit_to_budget import limit_for
from memrewrite.simulate import Timeline
from memrewrite.workload.stepping import told
from memrewrite.workload.workload import Workload

EXIT_OVER_BUDGET = 1
_NOT_MEASURED = "Not measured: one process cannot take its part of a step in {mesh}, which is predicted."
_NOTHING = Outcome({}, lambda console: None)  # of a process that another one answers for
Job = jobs.Job[OptimizeRequest]


def run(request: OptimizeRequest) -> int:
    """Carry out the request and give the exit code; raises what ``memrewrite.records.errors`` names."""
    budget = None if request.budget is None else replace(Budget.parse(request.budget), reserved=request.reserved)
    if request.png is not None:
        png.require()
    work = _check if request.check else _optimize
    if request.mesh is None or processes() == 1:
        return jobs.run(request, lambda job, stage: work(job, budget, stage, lambda: None))
    asked = together.silent(request)
    return together.run(request.mesh, lambda ready: jobs.run(asked, lambda job, stage: work(job, budget, stage, ready)))


def _check(job: Job, budget: Budget | None, stage: Stages, ready: Callable[[], None]) -> Outcome:
    """Whether the original fits the budget as predicted; nothing is changed or written."""
    ready()
    if not is_first():
        return _NOTHING
    limit = limit_for(budget, False, job.step.device_type(job.module, job.inputs))
    stage("simulate")
    workspace = job.step.target.workspace_bytes(job.device, job.step.amp, job.step.mode)
    found = simulate_original(job.module, job.inputs, job.step, workspace)
    if limit is None or (bound := limit.resolve(limit.of(found))) is None:
        raise InternalError("A check without a budget in bytes or per cent was let through.")
    kind = "reserved" if limit.reserved else "peak"
    fits = limit.of(found) <= bound
    line = f"{job.name}: predicted {kind} {format_bytes(limit.of(found))}, budget {format_bytes(bound)}: "
    line += "fits" if fits else "does not fit"
    payload = {
        "model": job.name,
        "predicted_peak": found.peak,
        "predicted_reserved": found.reserved,
        "budget": bound,
        "fits": fits,
    }
    return Outcome(payload, lambda console: say(console, line), 0 if fits else EXIT_OVER_BUDGET)


def _optimize(job: Job, budget: Budget | None, stage: Stages, ready: Callable[[], None]) -> Outcome:
    request = job.request
    asked = Request(
        budget,
        device=job.planned_for,
        names=request.pass_names,
        exact=request.exact,
        compiled=request.compiled,
        verify=request.verify,
        strict=request.strict,
        returns=request.returns,
        seed=request.seed,
        dynamic=request.dynamic,
    )
    asked.check(job.module)
    work = Workload(job.module, job.inputs, job.step)
    ready()
    outcome = planned(work, asked, store_in(request.plans), stage, lambda peak: _offered(peak, stage)).outcome
    return _NOTHING if outcome is None else _told(job, outcome, stage)


def _told(job: Job, outcome: optimizing.Outcome, stage: Stages) -> Outcome:
    """Measure, save and report what came of the request, as it asks."""
    request, optimized = job.request, outcome.module
    report: Report = replace(outcome.report, model=job.name, command_line=request.typed)
    if request.measure and not _takes_a_step_alone(job):
        report = replace(report, notes=(*report.notes, _NOT_MEASURED.format(mesh=job.step.mesh)))
    if (todo := told(job.step)) is not None and report.changed:
        report = replace(report, notes=(*report.notes, todo))
    if request.advise and report.budget is not None:
        stage("advise")
        report = replace(report, options=_options(job, report, report.budget))
    if request.report is not None or request.png is not None:
        stage("sizes")
        report = replace(report, by_size=by_size(optimized, report))
    changes = _changes(outcome) if request.diff else None
    timelines = _timelines(outcome) if request.snapshot else []
    report = _finish(job, optimized, report, stage)
    _write(request, report, timelines)
    written = request.output if report.changed else None
    fits = report.measured_before is not None or not _measures(job)
    payload = {**report.to_json(), "written": written and str(written)}
    if changes is not None:
        payload["diff"] = changes

    def show(console: Console) -> None:
        if changes is not None:
            say(console, changes)
        tables.show(report, console, verbose=request.verbose, written=written, fits=fits)

    return Outcome(payload, show, EXIT_OVER_BUDGET if tables.over_budget(report) else 0)


def _offered(peak: int, stage: Stages) -> bool:
    """Whether the user who interrupted planning takes the best plan so far; no where none did."""
    if isinstance(sys.exception(), Ended):
        return False
    return stage.confirmed(f"Interrupted. A plan that peaks at {format_bytes(peak)} was found; verify and use it?")


def _options(job: Job, report: Report, budget: int) -> tuple[Option, ...]:
    """What else would fit the budget, were the model left as it is."""
    step = job.step
    modes: tuple[Literal["train", "inference"], ...] = ("train", "inference")
    workspaces: dict[str, int] = {mode: step.target.workspace_bytes(job.device, step.amp, mode) for mode in modes}
    bounded = Budget(bytes=budget, reserved=report.reserved)
    variants = advice.Variants(job.module, job.inputs, step, workspaces, bounded=bounded)
    return advice.options(variants, budget, bounded.of(report.predicted_before))


def _timelines(outcome: optimizing.Outcome) -> list[Timeline]:
    """Of the rewritten model and of the original, by submodule; of one where nothing was rewritten."""
    rewritten, original = outcome.bench, outcome.original
    before = original.predict(original.model, attribute=True)
    return [before] if not outcome.rewritten else [rewritten.predict(outcome.module, attribute=True), before]


def _write(request: OptimizeRequest, report: Report, timelines: list[Timeline]) -> None:
    """The files that were asked for besides the folder and the JSON."""
    if request.report is not None:
        fill(request.report, report.to_html().encode(errors="backslashreplace"))
    if request.png is not None:
        fill(request.png, png.to_png(report))
    if request.snapshot is not None:
        fill(request.snapshot, to_pickle(timelines))


def _finish(job: Job, optimized: nn.Module, report: Report, stage: Stages) -> Report:
    """Measure and save what is asked for; the report with what was measured.

    What is saved is verified once more, in a fresh process. That one and the measuring process load the rewritten
    model from its folder, which gets its name only after both went well.
    """
    request = job.request
    if not report.changed:
        return _measured(job, report, None, stage) if _measures(job) else report
    known = report

    def check(draft: Path) -> Report:
        nonlocal known
        divided = job.step.divides_layers  # which the model that is loaded there is not
        if request.output is not None and request.verify and not divided:
            _verify_saved(job, report, draft, stage)
        known = _measured(job, report, draft, stage) if _measures(job) else report
        return known

    stage("save")
    if request.output is not None:
        save(optimized, request.output, force=request.force, report=report, check=check)
    elif _measures(job):
        with tempfile.TemporaryDirectory(prefix="memrewrite-") as scratch:
            save(optimized, Path(scratch) / "rewritten", report=report, check=check)
    return known


def _measures(job: Job) -> bool:
    """Whether to measure: it is asked for, the device is there, and no other process has a part of the step."""
    return job.request.measure and job.step.target.measurable and _takes_a_step_alone(job)


def _takes_a_step_alone(job: Job) -> bool:
    return not isinstance(job.step.mesh, Fsdp | Tp)


def _measured(job: Job, report: Report, artifact: Path | None, stage: Stages) -> Report:
    """The report with what really happens, each variant in a fresh process; an original out of memory does not fit.

    ``artifact`` is the saved rewritten model, None where nothing was rewritten.
    """

    def measured(what: Loader, name: str) -> Measured:
        stage(f"measure {name}")
        return measure_in_child(what, job.request.step, timeout_s=job.request.timeout)

    before = None
    try:
        before = measured(job.loader(), "original")
    except DoesNotFitError as error:
        if artifact is None:
            raise
        report = replace(report, notes=(*report.notes, f"The original does not fit: {error}"))
    after = before if artifact is None else measured(job.loader(artifact), "rewritten")
    return replace(report, measured_before=before, measured_after=after)


def _verify_saved(job: Job, report: Report, artifact: Path, stage: Stages) -> None:
    """Raise ``NotEquivalentError`` unless the artifact is what was proved; bit for bit where that was bit-equal."""
    stage("verify saved")
    exact = job.request.exact or all(check.bit_equal == check.count for check in report.checks)
    verify_in_child(job.loader(artifact), job.request.step, exact=exact, timeout_s=job.request.timeout)


def _changes(outcome: optimizing.Outcome) -> str:
    """What changed in the code of the graphs, as captured against as rewritten; empty where nothing was."""
    after = {path: program.source for path, program in programs(outcome.module).items()}
    return code_diff(outcome.captured(), after) if after else ""
