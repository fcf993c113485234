"""``memrewrite show``: what an artifact holds. It is read, checked and printed, never imported or run."""

import json
from pathlib import Path
from typing import Any

from memrewrite.artifact import manifest
from memrewrite.commands.answer import Outcome, respond
from memrewrite.commands.requests import ShowRequest
from memrewrite.records.errors import UsageError
from memrewrite.records.report import Report
from memrewrite.report.contents import Contents, show
from memrewrite.report.read import report_from


def run(request: ShowRequest) -> int:
    """Carry out the request and give the exit code; raises ``UsageError`` for a folder that is not as written."""
    facts = manifest.read(request.artifact)
    code = (request.artifact / manifest.MODEL).read_text(encoding="utf-8")
    sizes = {name: (request.artifact / name).stat().st_size for name in facts["files"]}
    contents = Contents(
        str(request.artifact), facts, _report(request.artifact, facts), sizes, manifest.MODEL, len(code.splitlines())
    )
    return respond(
        request,
        lambda stage: Outcome(contents.to_json(), lambda console: show(contents, console, verbose=request.verbose)),
    )


def _report(folder: Path, facts: dict[str, Any]) -> Report | None:
    if manifest.REPORT not in facts["files"]:
        return None
    file = folder / manifest.REPORT
    try:
        return report_from(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} is not a report as this memrewrite writes it; make the artifact again.") from error
