"""A verdict by groups of values, and the files it was found on, as text for a terminal of 80 columns."""

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memrewrite.records.outcomes import Check
from memrewrite.report.tables import table
from memrewrite.report.text import plain

_SHOWN = 16  # digits of a SHA-256, of 64; all are in the JSON


def show(
    title: str,
    checks: Sequence[Check],
    summary: str,
    files: Mapping[str, str],
    console: Console,
    *,
    verbose: bool = False,
) -> None:
    """Print the verdict on every group of values, the files that were checked, and the sentence.

    Which value of a group is the worst is said where it differs too much, with ``verbose`` wherever one differs.
    """
    passed = all(check.passed for check in checks) and bool(checks)
    parts: list[RenderableType] = [
        Text(plain(title), style="bold"),
        *([_checks(checks)] if checks else []),
        *(_worst(check) for check in checks if check.worst and (verbose or not check.passed)),
        Text(),
        digests(files),
        Text(),
        Text(plain(f"Verdict: {summary}"), style="green" if passed else "red"),
    ]
    console.print(Group(*parts), markup=False, highlight=False, emoji=False)


def digests(files: Mapping[str, str], sizes: Mapping[str, int] | None = None) -> Table:
    """The files of an artifact, each found to be what the manifest says, with their sizes in bytes if known."""
    rows = table("file", *([] if sizes is None else ["bytes"]), "SHA-256, as in the manifest")
    for name, digest in files.items():
        size = [] if sizes is None else [str(sizes[name])]
        rows.add_row(Text(plain(name)), *size, plain(f"{digest[:_SHOWN]}..."))
    return rows


def _checks(checks: Sequence[Check]) -> Table:
    rows = table("values", "bit-equal", "worst error", "original's own", "allowed", "verdict")
    for check in checks:
        row = Text(plain(check.group)), f"{check.bit_equal} of {check.count}", *_figures(check)
        rows.add_row(*row, "same" if check.passed else Text("differs", style="red"))
    return rows


def _worst(check: Check) -> Text:
    return Text(plain(f"The worst {check.group}: {check.worst}"))


def _figures(check: Check) -> tuple[str, str, str]:
    """The error of the worst value, the original's own error against the same reference, and what is allowed."""
    if check.bit_equal == check.count:
        return "", "", ""
    if check.error is None:
        return "no number", "", ""
    own, allowed = (f"{size:.2g}" if size is not None else "" for size in (check.own_error, check.allowed))
    return f"{check.error:.2g}", own, allowed
