"""Verify a written artifact in a fresh process, which knows the model only by its target and the folder."""

from dataclasses import asdict

from memrewrite.child import run_job
from memrewrite.errors import NotEquivalentError
from memrewrite.measuring import Loader
from memrewrite.stepspec import StepSpec


def verify_in_child(loader: Loader, step: StepSpec, *, exact: bool, timeout_s: float) -> str:
    """The verdict, a sentence, on ``loader.artifact`` applied to ``loader.target`` against the target as it is.

    ``exact`` demands every bit. Raises ``NotEquivalentError`` when they differ, ``MeasurementError`` when the process
    dies or takes longer than ``timeout_s`` seconds, and what loading raises.
    """
    job = {
        "kind": "verify",
        "device": loader.device,
        "loader": asdict(loader),
        "step": step.to_json(),
        "exact": exact,
    }
    verdict = run_job(job, timeout_s=timeout_s)
    if not verdict["equivalent"]:
        raise NotEquivalentError(f"The rewritten model as saved is {verdict['summary']}; nothing was written.")
    summary: str = verdict["summary"]
    return summary
