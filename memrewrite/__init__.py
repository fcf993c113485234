"""memrewrite: rewrite a PyTorch model so that its training step fits a byte budget, and prove nothing else changed.

    optimized = memrewrite.optimize(model, example_inputs, budget="8GB")

``optimized`` is a drop-in for ``model``; ``optimized.report`` says what was done, refused, predicted and proved.
"""

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

__version__ = "0.1.0"

_LAZY = {
    "optimize": "memrewrite.api",
    "measure": "memrewrite.measure",
    "verify": "memrewrite.verify",
    "load": "memrewrite.artifact.load",
    "Report": "memrewrite.report.data",
    "FallbackWarning": "memrewrite.runtime.dropin",
    "Swish": "memrewrite.runtime.swish",
    "swish": "memrewrite.runtime.swish",
}

__all__ = [
    "Budget",
    "BudgetInfeasibleError",
    "CaptureError",
    "MeasurementError",
    "MemrewriteError",
    "NotEquivalentError",
    "TargetError",
    "UsageError",
    *_LAZY,
]


def __getattr__(name: str) -> object:
    """Import what needs PyTorch when it is first asked for, so that ``memrewrite --help`` is quick."""
    if name not in _LAZY:
        raise AttributeError(f"module 'memrewrite' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
