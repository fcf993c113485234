"""The report as one HTML page that needs nothing else: no file beside it, no network, no font but the reader's own.

Everything in it that comes from the model is foreign text and is escaped; a policy in the page's head lets the browser
run no script but the one that shows what lies under the pointer.
"""

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from memrewrite.report.kinds import KINDS
from memrewrite.report.page import rows
from memrewrite.report.page.chart import chart
from memrewrite.report.page.sizes import size_chart
from memrewrite.report.text import plain, short_bytes

if TYPE_CHECKING:
    from memrewrite.records.report import Report


def to_html(report: "Report") -> str:
    """The page."""
    environment = _environment()
    script, _, _ = environment.loader.get_source(environment, "hover.js")  # type: ignore[union-attr]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = environment.get_template("page.html")
    drawn = {"chart": chart(report), "sizes": size_chart(report)}
    return page.render(report=report, rows=rows, kinds=KINDS, script=script, digest=digest, **drawn) + "\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("memrewrite.report.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = short_bytes
    return environment


def _visible(value: Any) -> Any:
    """Text of the model without control characters; what the template itself marked safe stays."""
    return plain(value) if type(value) is str else value
