"""The report that a result carries, and how to find it there."""

from inspect import getattr_static

from torch import nn

from memrewrite.records.errors import UsageError
from memrewrite.records.report import Report
from memrewrite.runtime.dropin import own

_KEY = "_memrewrite_report"


def attach(report: Report, *modules: nn.Module) -> nn.Module:
    """Let ``report`` be the report of each of ``modules``; returns the last one."""
    for module in modules:
        _attach(module, report)
    return modules[-1]


def _attach(module: nn.Module, report: Report) -> None:
    """Let ``report_of(module)`` be ``report``, and ``module.report`` unless the model has an attribute of that name.

    A drop-in keeps it outside of its attributes.
    """
    tensors_and_modules = (vars(module)[kind] for kind in ("_parameters", "_buffers", "_modules"))
    theirs = getattr_static(module, "report", report)
    free = isinstance(theirs, Report) and not any("report" in named for named in tensors_and_modules)
    if (kept := own(module)) is not None:
        kept.carry(report, shown=free)
        return
    vars(module)[_KEY] = report
    if free:
        vars(module)["report"] = report


def report_of(module: nn.Module) -> Report:
    """The report of what ``memrewrite.optimize`` returned, also where ``module.report`` is the model's own.

    Raises ``UsageError`` for any other module.
    """
    kept = own(module)
    report = vars(module).get(_KEY) if kept is None else kept.report
    if not isinstance(report, Report):
        raise UsageError(f"This {type(module).__name__} has no report; it is not what memrewrite.optimize returned.")
    return report
