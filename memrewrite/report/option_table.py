"""Other ways to take a step as a table for a terminal of 80 columns."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from memrewrite.records.options import short_bytes
from memrewrite.records.outcomes import Option
from memrewrite.report.text import plain


def option_table(options: Iterable[Option]) -> Table:
    """One row for each option, in their order."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("option", ratio=1)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("cost", ratio=1)
    for option in options:
        fits = Text("yes", style="green") if option.fits else Text("no", style="red")
        table.add_row(Text(plain(option.name)), short_bytes(option.peak_bytes), fits, Text(plain(option.cost)))
    return table
