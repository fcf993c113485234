"""What the report on a result is told by the loop that trains it."""

import warnings

from torch import nn

from memrewrite.optimizing.by_size import noted
from memrewrite.records.attached import attach, report_of
from memrewrite.runtime.promise import BeyondPlanWarning


def note(result: nn.Module, text: str) -> None:
    """Add a note to the report on a result."""
    attach(noted(report_of(result), text, result), result)


def tell_of_calls(result: nn.Module, loop: str, path: str, calls: int) -> None:
    """Warn that ``loop`` called what it knows as ``path`` so often before backward, and note it in the report."""
    told = (
        f"{loop} calls {path} {calls} times before backward, which takes more than the one call that was planned; "
        "optimize a module whose forward makes all of these calls."
    )
    note(result, told)
    warnings.warn(told, BeyondPlanWarning, stacklevel=3)
