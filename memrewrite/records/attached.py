"""The report that a result carries, and how to find it there."""

from collections.abc import Callable
from importlib import import_module
from inspect import getattr_static
from typing import Any, overload

from torch import nn

from memrewrite.records.compiled import CompiledReport
from memrewrite.records.errors import UsageError
from memrewrite.records.report import Report
from memrewrite.runtime.dropin import own

_KEY = "_memrewrite_report"
# Who knows of what was compiled, named and not imported: it is much, and most modules are not.
_COMPILED = "memrewrite.backends.told"


def attach(report: Report, *modules: nn.Module) -> nn.Module:
    """Let ``report`` be the report of each of ``modules``; returns the last one."""
    for module in modules:
        _attach(module, report)
    return modules[-1]


def _attach(module: nn.Module, report: Report) -> None:
    """Let ``report_of(module)`` be ``report``, and ``module.report`` unless the model has an attribute of that name.

    A drop-in keeps it outside of its attributes, in which it may have got that of the model from an earlier time.
    """
    tensors_and_modules = (vars(module)[kind] for kind in ("_parameters", "_buffers", "_modules"))
    theirs = getattr_static(module, "report", report)
    free = isinstance(theirs, Report) and not any("report" in named for named in tensors_and_modules)
    if (kept := own(module)) is not None:
        if free:
            vars(module).pop("report", None)
        kept.carry(report, shown=free)
        return
    vars(module)[_KEY] = report
    if free:
        vars(module)["report"] = report


@overload
def report_of(module: nn.Module) -> Report: ...  # type: ignore[overload-overlap]
@overload
def report_of(module: Callable[..., Any]) -> CompiledReport: ...


def report_of(module: Any) -> Report | CompiledReport:
    """The report of what ``memrewrite.optimize`` returned, also where ``module.report`` is the model's own.

    Of what ``torch.compile(model, backend="memrewrite")`` returned, and of a module that was compiled so in place or
    has parts that were, it is a ``CompiledReport`` of the graphs that there are by now; type checkers take the former
    for a function, and the latter for any other module. Raises ``UsageError`` for anything else, and before the first
    step of what is compiled.
    """
    kept = own(module) if isinstance(module, nn.Module) else None
    report = getattr(module, "__dict__", {}).get(_KEY) if kept is None else kept.report
    if isinstance(report, Report):
        return report
    made: CompiledReport | None = import_module(_COMPILED).report(module)
    if made is None:
        raise UsageError(
            f"This {type(module).__name__} has no report; it is not what memrewrite.optimize returned, nor what "
            'torch.compile(..., backend="memrewrite") did.'
        )
    return made
