"""Verify a written artifact in a fresh process, which knows the model only by its target and the folder."""

from dataclasses import asdict, dataclass

from memrewrite.measurement.measuring import Loader
from memrewrite.process.child import run_job
from memrewrite.records.errors import NotEquivalentError
from memrewrite.records.outcomes import Check
from memrewrite.workload.stepspec import StepSpec


@dataclass(frozen=True)
class Rechecked:
    """The verdict of another process: ``verifying.Verdict`` by group of values."""

    equivalent: bool
    exact: bool
    summary: str
    batch: int | None
    checks: tuple[Check, ...]


def recheck(loader: Loader, step: StepSpec, *, exact: bool, timeout_s: float) -> Rechecked:
    """The verdict on ``loader.artifact`` applied to ``loader.target`` against the target as it is.

    ``exact`` demands every bit. Raises ``MeasurementError`` when the process dies or takes longer than ``timeout_s``
    seconds, and what loading raises.
    """
    job = {
        "kind": "verify",
        "device": loader.device,
        "loader": asdict(loader),
        "step": step.to_json(),
        "exact": exact,
    }
    found = run_job(job, timeout_s=timeout_s)
    return Rechecked(**{**found, "checks": tuple(Check(**check) for check in found["checks"])})


def verify_in_child(loader: Loader, step: StepSpec, *, exact: bool, timeout_s: float) -> str:
    """The verdict as a sentence; raises ``NotEquivalentError`` when they differ, and what ``recheck`` raises."""
    verdict = recheck(loader, step, exact=exact, timeout_s=timeout_s)
    if not verdict.equivalent:
        raise NotEquivalentError(f"The rewritten model as saved is {verdict.summary}; nothing was written.")
    return verdict.summary
