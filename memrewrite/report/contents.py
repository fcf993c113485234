"""What an artifact holds, as text for a terminal of 80 columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from memrewrite.records.options import format_bytes
from memrewrite.records.report import Report
from memrewrite.report import tables
from memrewrite.report.proof import digests
from memrewrite.report.text import plain


@dataclass(frozen=True)
class Contents:
    """An artifact as read: its manifest, its report, the size of each file in bytes, the name and lines of its code."""

    folder: str
    manifest: dict[str, Any]
    report: Report | None
    sizes: Mapping[str, int]
    code: str
    lines: int

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        code = {"bytes": self.sizes[self.code], "lines": self.lines}
        report = None if self.report is None else self.report.to_json()
        return {"artifact": self.folder, "manifest": self.manifest, "code": code, "report": report}


def show(contents: Contents, console: Console, *, verbose: bool = False) -> None:
    """Print who made the artifact for what, its report, its code's size, its files."""
    facts = contents.manifest
    known = facts.get("torch")
    torch = known if isinstance(known, dict) else {}
    made = (
        f"made by memrewrite {facts.get('memrewrite')}, torch {torch.get('written_with')}, Python {facts.get('python')}"
    )
    code = (
        f"Generated code: {contents.lines} lines, {format_bytes(contents.sizes[contents.code])}; not run, not imported"
    )
    head = [f"{contents.folder}: {made}", f"For {facts.get('model')}, with torch {torch.get('minimum')} or newer", ""]
    console.print(Group(*(Text(plain(line)) for line in head)), markup=False, highlight=False, emoji=False)
    if contents.report is not None:
        tables.show(contents.report, console, verbose=verbose, written=Path(contents.folder))
    parts: list[RenderableType] = [Text(code), Text(), digests(facts["files"], contents.sizes)]
    console.print(Group(*parts), markup=False, highlight=False, emoji=False)
