"""Rewrite a PyTorch model so that its training step fits a byte budget, and prove nothing else changed.

Fit a model, with the inputs of one step, into 8 GB of device memory::

    optimized = memrewrite.optimize(model, example_inputs, budget="8GB", optimizer="adamw", amp="bf16")

``optimized`` is a drop-in for ``model``: it shares its parameters and ``state_dict`` keys and is an instance of its
class, so the training loop stays as it is. ``optimized.report``, a ``Report``, says what was rewritten, refused,
predicted and proved. What cannot be done raises a ``MemrewriteError``, one sentence that says what to do.

See for yourself what a step takes, and that two models take the same one::

    memrewrite.measure(model, example_inputs).peak              # bytes, on the device itself
    memrewrite.verify(model, optimized, example_inputs).summary

See whether your loop keeps to what was promised, and what of it does not::

    with memrewrite.watch(optimized):
        train(optimized)

``memrewrite.load`` applies a folder that ``memrewrite optimize -o`` wrote on the command line to a model.
"""

from typing import TYPE_CHECKING

from memrewrite.records.errors import (
    BudgetInfeasibleError,
    CaptureError,
    MeasurementError,
    MemrewriteError,
    NotEquivalentError,
    TargetError,
    UsageError,
)
from memrewrite.records.options import Budget
from memrewrite.version import __version__ as __version__

if TYPE_CHECKING:
    from memrewrite.api import OptimizedModule, measure, optimize, verify
    from memrewrite.artifact.load import load
    from memrewrite.equivalence.verdict import Verdict
    from memrewrite.estimates import Estimate, estimate
    from memrewrite.measurement.watching import OverBudgetWarning, watch
    from memrewrite.records.attached import report_of
    from memrewrite.records.compiled import CompiledGraph, CompiledReport
    from memrewrite.records.loop import Loop
    from memrewrite.records.outcomes import Measured
    from memrewrite.records.report import Report
    from memrewrite.runtime.promise import BeyondPlanError, BeyondPlanWarning, FallbackWarning, LazyOutputWarning
    from memrewrite.runtime.swish import Swish, swish
    from memrewrite.workload.in_backward import step_in_backward
    from memrewrite.workload.in_groups import step_in_groups

_LAZY = {
    "CompiledGraph": "memrewrite.records.compiled",
    "CompiledReport": "memrewrite.records.compiled",
    "Estimate": "memrewrite.estimates",
    "BeyondPlanError": "memrewrite.runtime.promise",
    "BeyondPlanWarning": "memrewrite.runtime.promise",
    "FallbackWarning": "memrewrite.runtime.promise",
    "LazyOutputWarning": "memrewrite.runtime.promise",
    "Loop": "memrewrite.records.loop",
    "Measured": "memrewrite.records.outcomes",
    "OptimizedModule": "memrewrite.api",
    "OverBudgetWarning": "memrewrite.measurement.watching",
    "Report": "memrewrite.records.report",
    "Swish": "memrewrite.runtime.swish",
    "Verdict": "memrewrite.equivalence.verdict",
    "estimate": "memrewrite.estimates",
    "load": "memrewrite.artifact.load",
    "measure": "memrewrite.api",
    "optimize": "memrewrite.api",
    "report_of": "memrewrite.records.attached",
    "step_in_backward": "memrewrite.workload.in_backward",
    "step_in_groups": "memrewrite.workload.in_groups",
    "swish": "memrewrite.runtime.swish",
    "verify": "memrewrite.api",
    "watch": "memrewrite.measurement.watching",
}

__all__ = [
    "BeyondPlanError",
    "BeyondPlanWarning",
    "Budget",
    "BudgetInfeasibleError",
    "CaptureError",
    "CompiledGraph",
    "CompiledReport",
    "Estimate",
    "FallbackWarning",
    "LazyOutputWarning",
    "Loop",
    "Measured",
    "MeasurementError",
    "MemrewriteError",
    "NotEquivalentError",
    "OptimizedModule",
    "OverBudgetWarning",
    "Report",
    "Swish",
    "TargetError",
    "UsageError",
    "Verdict",
    "estimate",
    "load",
    "measure",
    "optimize",
    "report_of",
    "step_in_backward",
    "step_in_groups",
    "swish",
    "verify",
    "watch",
]


def __getattr__(name: str) -> object:
    """Import what needs PyTorch when it is first asked for, so that ``memrewrite --help`` is quick."""
    if name not in _LAZY:
        raise AttributeError(f"module 'memrewrite' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """Also what is not imported yet, so that completion and ``help(memrewrite)`` show it."""
    return sorted({*globals(), *__all__})
