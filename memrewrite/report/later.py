"""What a report is given only as a page or a drawing of it is written, because it takes long to find out.

It is kept beside the report, which stays plain data: a copy, or what comes back from a file, knows nothing of it.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memrewrite.records.report import Report

_WAYS: "dict[int, Callable[[], Report | None]]" = {}


def complete_by(report: "Report", way: "Callable[[Report], Report]") -> None:
    """Let ``way(report)`` be ``completed(report)``, found out once; it lives as long as the report."""
    there = weakref.ref(report)

    @cache
    def once() -> "Report | None":
        found = there()
        return None if found is None else way(found)

    _WAYS[id(report)] = once
    weakref.finalize(report, _WAYS.pop, id(report), None).atexit = False


def completed(report: "Report") -> "Report":
    """The report with what is known of it only now; itself where nothing was promised."""
    way = _WAYS.get(id(report))
    return (None if way is None else way()) or report
