"""What the command line does once its options are parsed: load, optimize, measure, save, report."""

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from memrewrite import api, registry, target
from memrewrite.artifact.recheck import verify_in_child
from memrewrite.artifact.save import check_place, save
from memrewrite.codegen import generate
from memrewrite.errors import MeasurementError, UsageError
from memrewrite.inputs import first_line, to_device
from memrewrite.measure import Loader, measure_in_child
from memrewrite.options import Budget, format_bytes
from memrewrite.progress import Stages
from memrewrite.regions import find
from memrewrite.report import tables
from memrewrite.report.data import SCHEMA_VERSION, Measured, Report, report_of
from memrewrite.runtime.dropin import programs
from memrewrite.simulate.workspaces import workspace_bytes
from memrewrite.step import Inputs, Step
from memrewrite.stepspec import StepSpec

if TYPE_CHECKING:
    from memrewrite.cli import Request

EXIT_OVER_BUDGET = 1


@dataclass(frozen=True)
class _Job:
    """A request made concrete: the model and its inputs on their device, and the step."""

    request: "Request"
    module: nn.Module
    inputs: Inputs
    name: str
    budget: Budget | None
    spec: StepSpec
    step: Step
    device: torch.device


@dataclass(frozen=True)
class _Outcome:
    """What a command found: the JSON it answers, how to print it, and its exit code."""

    payload: dict[str, Any]
    show: Callable[[Console], None]
    code: int


def optimize(request: "Request") -> int:
    """Carry out ``memrewrite optimize`` and give the exit code; raises what ``memrewrite.errors`` names."""
    out = sys.stdout
    budget = None if request.budget is None else Budget.parse(request.budget)
    spec = StepSpec(request.mode, request.optimizer, request.loss, request.amp)
    _check_places(request)
    # What the user's code prints must not mix with the result.
    with contextlib.redirect_stdout(sys.stderr), Stages(quiet=request.quiet, verbose=request.verbose) as stage:
        stage("load")
        torch.manual_seed(request.seed)
        wanted = _device(request.device)
        as_cuda = wanted.type == "cuda" and not torch.cuda.is_available()
        device = torch.device("cpu") if as_cuda else wanted
        loaded = target.load(request.target, request.input, request.batch_size)
        with target.importable(loaded.folder), _memory_errors(), _quiet_logs(request.verbose):
            module = loaded.module.to(device)
            if module.training != (request.mode == "train"):  # else leave submodules the user froze as they are
                module.train(request.mode == "train")
            inputs = to_device(loaded.inputs, device)
            step = replace(spec.build(), as_cuda=as_cuda)
            job = _Job(request, module, inputs, loaded.name, budget, spec, step, device)
            outcome = _check(job, stage) if request.check else _optimize(job, stage)
    text = json.dumps({**outcome.payload, "exit_code": outcome.code}, indent=2)
    if request.json == "-":
        print(text, file=out)
        return outcome.code
    if request.json is not None:
        _write_text(Path(request.json), text + "\n")
    outcome.show(Console(file=out, width=tables.WIDTH))
    return outcome.code


def _check(job: _Job, stage: Stages) -> _Outcome:
    """Whether the original fits the budget as predicted; nothing is changed or written."""
    stage("simulate")
    workspace = workspace_bytes(job.device, job.step.amp, job.step.mode, job.step.as_cuda)
    peak = api.simulate_original(job.module, job.inputs, job.step, workspace).peak
    limit = job.budget.resolve(peak) if job.budget else None
    if limit is None:
        raise UsageError("--check needs a budget in bytes or per cent; min says nothing about the model as it is.")
    verdict = "fits" if peak <= limit else "does not fit"
    line = f"{job.name}: predicted peak {format_bytes(peak)}, budget {format_bytes(limit)}: {verdict}"
    payload = {
        "schema_version": SCHEMA_VERSION,
        "model": job.name,
        "predicted_peak": peak,
        "budget": limit,
        "fits": peak <= limit,
        "command": _command(job.request),
    }
    return _Outcome(payload, lambda console: _say(console, line), 0 if peak <= limit else EXIT_OVER_BUDGET)


def _optimize(job: _Job, stage: Stages) -> _Outcome:
    request = job.request
    optimized = api.optimize(
        job.module,
        job.inputs.args,
        example_kwargs=job.inputs.kwargs,
        budget=job.budget,
        optimizer=job.step.optimizer,
        loss_fn=job.step.loss_fn,
        amp=job.step.amp,
        mode=request.mode,
        device="cuda" if job.step.as_cuda else None,
        passes=None if request.passes is None else tuple(request.passes.split(",")),
        exact=request.exact,
        verify=request.verify,
        seed=request.seed,
        progress=stage,
    )
    report: Report = replace(report_of(optimized), model=job.name)
    changes = _changes(job, optimized) if request.diff else None
    report = _finish(job, optimized, report, stage)
    written = request.output if report.changed else None
    fits = report.measured_before is not None or not _measures(job)
    payload = {**report.to_json(), "command": _command(request), "written": written and str(written)}
    if changes is not None:
        payload["diff"] = changes

    def show(console: Console) -> None:
        if changes is not None:
            _say(console, changes)
        tables.show(report, console, verbose=request.verbose, written=written, fits=fits)

    return _Outcome(payload, show, EXIT_OVER_BUDGET if tables.over_budget(report) else 0)


def _finish(job: _Job, optimized: nn.Module, report: Report, stage: Stages) -> Report:
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
        if request.output is not None and request.verify:
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


def _measures(job: _Job) -> bool:
    """Whether to measure: it is asked for, and the device is there."""
    return job.request.measure and not job.step.as_cuda


def _measured(job: _Job, report: Report, artifact: Path | None, stage: Stages) -> Report:
    """The report with what really happens, each variant in a fresh process; an original out of memory does not fit.

    ``artifact`` is the saved rewritten model, None where nothing was rewritten.
    """
    request = job.request
    loader = _loader(job)

    def measured(what: Loader, name: str) -> Measured:
        stage(f"measure {name}")
        return measure_in_child(what, job.spec, timeout_s=request.timeout)

    before = None
    try:
        before = measured(loader, "original")
    except MeasurementError as error:
        if artifact is None or "out of memory" not in str(error):
            raise
        report = replace(report, notes=(*report.notes, f"The original does not fit: {error}"))
    after = before if artifact is None else measured(replace(loader, artifact=str(artifact)), "rewritten")
    return replace(report, measured_before=before, measured_after=after)


def _verify_saved(job: _Job, report: Report, artifact: Path, stage: Stages) -> None:
    """Raise ``NotEquivalentError`` unless the artifact is what was proved; bit for bit where arithmetic was kept."""
    stage("verify saved")
    exact_passes = {each.name for each in registry.patterns(None, job.request.exact) if each.exact}
    inexact = set(registry.PATTERNS) - exact_passes
    exact = inexact.isdisjoint(name for name, _, _ in report.rewrites)
    loader = replace(_loader(job), artifact=str(artifact))
    verify_in_child(loader, job.spec, exact=exact, timeout_s=job.request.timeout)


def _loader(job: _Job) -> Loader:
    """How another process loads the model; this one gives up the device for it."""
    job.module.to("cpu")
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    request = job.request
    return Loader(request.target, request.input, request.batch_size, device=str(job.device), seed=request.seed)


def _changes(job: _Job, optimized: nn.Module) -> str:
    """A unified diff of the graph's code, as captured against as rewritten; empty where nothing was."""
    after = [program.source for program in programs(optimized).values()]
    if not after:
        return ""
    before = [generate(each.captured, each.prefix)[0] for each in find(job.module, job.inputs, job.step).found]
    return tables.diff("\n".join(before), "\n".join(after))


def _command(request: "Request") -> dict[str, Any]:
    """The effective configuration as plain data."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(request).items()}


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _check_places(request: "Request") -> None:
    """Refuse at once what could not be written in the end."""
    if request.check and request.output is not None:
        raise UsageError("--check writes nothing; leave out -o.")
    if request.output is not None:
        check_place(request.output, force=request.force)
    if request.json not in (None, "-") and not Path(str(request.json)).absolute().parent.is_dir():
        raise UsageError(f"There is no folder for the JSON file {request.json}; make it first.")


def _device(name: str) -> torch.device:
    """The device that ``--device`` names; raises ``UsageError`` where there is none of that name.

    A first CUDA device is one to plan for, where there is no CUDA.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"Device {name!r} is unknown; give auto, cpu or cuda:0.") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Device {name!r} is not supported; give auto, cpu or cuda:0.")
    if device.type == "cuda" and (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise UsageError(f"There is no device {name!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        text = f"The device ran out of memory: {first_line(error)}; try a smaller --batch-size or --device cpu."
        raise MeasurementError(text) from error
    except torch.AcceleratorError as error:
        text = f"The device failed while the model ran: {first_line(error)}; are all indices in the inputs in range?"
        raise MeasurementError(text) from error


@contextlib.contextmanager
def _quiet_logs(verbose: bool) -> Iterator[None]:
    """Keep PyTorch's own traceback of an operator that fails on fake tensors from stderr; the error itself is told."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = not verbose
    try:
        yield
    finally:
        logger.disabled = before


def _write_text(file: Path, text: str) -> None:
    """Write ``file`` whole or not at all; raises ``UsageError`` when the disk refuses."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; nothing was written.") from error
