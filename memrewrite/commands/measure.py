"""``memrewrite measure``: what a step really takes, each variant and batch size in a fresh process."""

from dataclasses import replace

from memrewrite.artifact import manifest
from memrewrite.commands.answer import Outcome, respond
from memrewrite.commands.job import device_named, loader_of
from memrewrite.commands.progress import Stages
from memrewrite.commands.requests import MeasureRequest
from memrewrite.measurement.measuring import Loader, measure_in_child
from memrewrite.records.errors import CaptureError, DoesNotFitError, MeasurementError, OtherInputsError, UsageError
from memrewrite.records.outcomes import Measured
from memrewrite.report import batch_plot, png
from memrewrite.report.measured import Failure, Pair, show


def run(request: MeasureRequest) -> int:
    """Carry out the request and give the exit code; raises what ``memrewrite.records.errors`` names."""
    if request.artifact is not None:
        manifest.read(request.artifact)  # what is damaged is found out before anything runs
    if request.plot is not None:
        png.require()
    return respond(request, lambda stage: _measure(request, stage))


def _measure(request: MeasureRequest, stage: Stages) -> Outcome:
    loader = loader_of(request, device_named(request.device))
    if request.compiled and not loader.compiled:
        raise UsageError(f"What torch.compile makes is measured on CUDA, not on {loader.device}; leave out --compiled.")
    pairs = [_pair(request, replace(loader, batch_size=size), stage) for size in request.batch_sizes or (None,)]
    _refuse_nothing(pairs)
    if request.plot is not None:
        stage("plot")
        batch_plot.draw(pairs, request.plot, request.target)
    payload = {"target": request.target, "mode": request.mode, "runs": [pair.to_json() for pair in pairs]}
    return Outcome(
        {**payload, "plot": request.plot and str(request.plot)},
        lambda console: show(pairs, f"{request.target}: {request.mode} step", console, plot=request.plot),
    )


def _pair(request: MeasureRequest, loader: Loader, stage: Stages) -> Pair:
    """Both variants at one batch size; what the target's own inputs have where none is given."""
    if loader.batch_size is None:
        loader = replace(loader, batch_size=request.batch_size)

    def measured(what: Loader, name: str) -> Measured | Failure:
        stage(f"measure {name}" + (f" at batch {what.batch_size}" if request.batch_sizes else ""))
        try:
            return measure_in_child(what, request.step, timeout_s=request.timeout)
        except (MeasurementError, OtherInputsError, CaptureError) as error:
            if not (request.batch_sizes or isinstance(error, DoesNotFitError)):
                raise
            return Failure(error)

    original = measured(loader, "original")
    if request.artifact is None:
        return Pair(loader.batch_size, original, None)
    return Pair(loader.batch_size, original, measured(replace(loader, artifact=str(request.artifact)), "rewritten"))


def _refuse_nothing(pairs: list[Pair]) -> None:
    """Raise the last failure where not one measurement went well."""
    failures = [each.error for pair in pairs for each in pair.variants.values() if isinstance(each, Failure)]
    if failures and not any(pair.measured for pair in pairs):
        raise failures[-1]
