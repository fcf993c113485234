"""memrewrite: rewrite a PyTorch model so that its training step fits a byte budget, and prove nothing else changed.

    optimized = memrewrite.optimize(model, example_inputs, budget="8GB")

``optimized`` is a drop-in for ``model``; ``optimized.report`` says what was done, refused, predicted and proved.
"""

from typing import TYPE_CHECKING

from memrewrite.errors import (
    BudgetInfeasibleError,
    CaptureError,
    MeasurementError,
    MemrewriteError,
    NotEquivalentError,
    TargetError,
    UsageError,
)
from memrewrite.options import Budget

if TYPE_CHECKING:
    from memrewrite.api import OptimizedModule, optimize
    from memrewrite.artifact.load import load
    from memrewrite.estimates import Estimate, estimate
    from memrewrite.report.data import Report, report_of
    from memrewrite.runtime.dropin import FallbackWarning
    from memrewrite.runtime.swish import Swish, swish

__version__ = "0.1.0"

_LAZY = {
    "Estimate": "memrewrite.estimates",
    "FallbackWarning": "memrewrite.runtime.dropin",
    "OptimizedModule": "memrewrite.api",
    "Report": "memrewrite.report.data",
    "Swish": "memrewrite.runtime.swish",
    "estimate": "memrewrite.estimates",
    "load": "memrewrite.artifact.load",
    "optimize": "memrewrite.api",
    "report_of": "memrewrite.report.data",
    "swish": "memrewrite.runtime.swish",
}

__all__ = [
    "Budget",
    "BudgetInfeasibleError",
    "CaptureError",
    "Estimate",
    "FallbackWarning",
    "MeasurementError",
    "MemrewriteError",
    "NotEquivalentError",
    "OptimizedModule",
    "Report",
    "Swish",
    "TargetError",
    "UsageError",
    "estimate",
    "load",
    "optimize",
    "report_of",
    "swish",
]


def __getattr__(name: str) -> object:
    """Import what needs PyTorch when it is first asked for, so that ``memrewrite --help`` is quick."""
    if name not in _LAZY:
        raise AttributeError(f"module 'memrewrite' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
