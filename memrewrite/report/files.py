"""Reports as files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrewrite.records.errors import UsageError
from memrewrite.report import page, png
from memrewrite.report.later import completed
from memrewrite.report.writing import fill

if TYPE_CHECKING:
    from memrewrite.records.report import Report


def save(report: "Report", file: Path) -> None:
    """Write ``report`` as the ending of ``file`` says; raises ``UsageError`` for an ending other than those known."""
    makers = {
        ".html": lambda: page.to_html(completed(report)).encode(),
        ".png": lambda: png.to_png(completed(report)),
        ".json": lambda: json_text(report.to_json()).encode(),
    }
    make = makers.get(file.suffix.lower())
    if make is None:
        raise UsageError(f"{file} ends in none of {', '.join(makers)}, which say what a report is written as.")
    fill(file, make())


def json_text(data: dict[str, Any]) -> str:
    """JSON that a person can read: indented, but a list of figures on one line."""
    return f"{_indented(data, '')}\n"


def _indented(value: Any, indent: str) -> str:
    inside = indent + "  "
    if isinstance(value, dict) and value:
        parts = [f"{json.dumps(str(key))}: {_indented(each, inside)}" for key, each in value.items()]
        opening, closing = "{}"
    elif isinstance(value, list | tuple) and any(isinstance(each, dict | list | tuple) for each in value):
        parts, (opening, closing) = [_indented(each, inside) for each in value], "[]"
    else:
        return json.dumps(value)
    return f"{opening}\n{inside}" + f",\n{inside}".join(parts) + f"\n{indent}{closing}"
