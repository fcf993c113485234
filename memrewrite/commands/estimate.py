"""``memrewrite estimate``: what a step takes, before it is run."""

from dataclasses import replace

from rich.console import Console

from memrewrite.commands import job as jobs
from memrewrite.commands.answer import Outcome
from memrewrite.commands.progress import Stages
from memrewrite.commands.requests import EstimateRequest
from memrewrite.estimates import estimate
from memrewrite.report import estimate_table

EXIT_DOES_NOT_FIT = 1
Job = jobs.Job[EstimateRequest]


def run(request: EstimateRequest) -> int:
    """Carry out the request and give the exit code; raises what ``memrewrite.records.errors`` names."""
    return jobs.run(request, _estimate, on_device=False)


def _estimate(job: Job, stage: Stages) -> Outcome:
    request = job.request
    found = estimate(
        job.module,
        job.inputs.args,
        example_kwargs=job.inputs.kwargs,
        optimizer=job.step.optimizer,
        loss_fn=job.step.loss_fn,
        amp=job.step.amp,
        mode=request.mode,
        micro_batches=request.micro_batches,
        loop=job.step.loop,
        mesh=job.step.mesh,
        device=job.planned_for,
        device_memory=request.device_memory,
        progress=stage,
    )
    found = replace(found, model=job.name)

    def show(console: Console) -> None:
        estimate_table.show(found, console, depth=request.depth)

    return Outcome(found.to_json(), show, EXIT_DOES_NOT_FIT if found.fits is False else 0)
