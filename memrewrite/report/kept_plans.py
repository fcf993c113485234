"""The plans in a folder, as text for a terminal of 80 columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from memrewrite.records.options import format_bytes, short_bytes
from memrewrite.report.tables import table
from memrewrite.report.text import plain

_SHOWN = 12  # digits of a key, of 64; all are in the JSON


def show(plans: Sequence[Mapping[str, Any]], folder: Path, console: Console, *, verbose: bool = False) -> None:
    """Print how many there are, what they take and where they lie, and a line for each; with ``verbose`` whole keys."""
    total = sum(each["bytes"] for each in plans)
    head = Text(plain(f"{folder}: {counted(len(plans))}, {format_bytes(total)}"), style="bold")
    console.print(head, markup=False, highlight=False, emoji=False, soft_wrap=True)
    rows = table("plan", "of", "on", "budget", "made", "bytes")
    for each in plans:
        budget = "none" if each["budget"] is None else short_bytes(each["budget"])
        names = (Text(plain(str(each[name]))) for name in ("model", "device"))
        rows.add_row(each["key"] if verbose else each["key"][:_SHOWN], *names, budget, each["made"], str(each["bytes"]))
    if plans:
        console.print(Group(rows), markup=False, highlight=False, emoji=False)


def counted(plans: int) -> str:
    """So many plans, in words."""
    return f"{plans} plan" if plans == 1 else f"{plans} plans"
