"""What a terminal of 80 columns would show, as text: for ``str()`` of a report, of which Python prints no colours."""

import io
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType

WIDTH = 80


def printed(parts: Iterable[RenderableType]) -> str:
    """The lines of ``parts``, without blanks at their ends."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_terminal=False)
    console.print(Group(*parts), markup=False, highlight=False, emoji=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
