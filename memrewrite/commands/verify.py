"""``memrewrite verify``: does a saved artifact still do what its target does? In a fresh process."""

from dataclasses import asdict

from memrewrite.artifact import manifest
from memrewrite.artifact.recheck import recheck
from memrewrite.commands.answer import Outcome, respond
from memrewrite.commands.job import device_named, loader_of
from memrewrite.commands.progress import Stages
from memrewrite.commands.requests import VerifyRequest
from memrewrite.records.errors import NotEquivalentError
from memrewrite.report.proof import show


def run(request: VerifyRequest) -> int:
    """Carry out the request and give the exit code; raises what ``memrewrite.records.errors`` names."""
    files = manifest.read(request.artifact)["files"]
    return respond(request, lambda stage: _verify(request, files, stage))


def _verify(request: VerifyRequest, files: dict[str, str], stage: Stages) -> Outcome:
    stage("verify")
    loader = loader_of(request, device_named(request.device), request.artifact)
    verdict = recheck(loader, request.step, exact=request.exact, timeout_s=request.timeout)
    payload = {"artifact": str(request.artifact), "target": request.target, **asdict(verdict), "files": files}
    title = f"{request.artifact} against {request.target}: {request.mode} step on {loader.device}"
    return Outcome(
        payload,
        lambda console: show(title, verdict.checks, verdict.summary, files, console, verbose=request.verbose),
        0 if verdict.equivalent else NotEquivalentError.exit_code,
    )
