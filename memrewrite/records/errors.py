"""Every error memrewrite raises on purpose, each with the exit code of the command line."""

from collections.abc import Iterable
from typing import Any

from memrewrite.records.outcomes import Option


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop; its type where it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


class MemrewriteError(Exception):
    """Base of the family: one sentence that says what is wrong, where, and what to do."""

    exit_code = 70

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), *self.args), vars(self)


def _made_again(kind: type[MemrewriteError], *args: object) -> MemrewriteError:
    """An error as another process raised it, but for its attributes: ``__init__`` may take more than the message."""
    return kind.__new__(kind, *args)


class UsageError(MemrewriteError):
    """The request itself is off: a budget, a target, an input or an option that cannot be meant."""

    exit_code = 2


class OtherInputsError(UsageError):
    """A rewritten model was given inputs it was not made for, so that it would run as the original."""


class TargetError(UsageError):
    """No model, several models, or no inputs where the target points."""


class OutputError(UsageError):
    """A result cannot be written where it was to go, such as to a device that is full."""

    exit_code = 74


class TorchVersionError(UsageError):
    """This version of PyTorch lacks something that memrewrite is built on."""


class CaptureError(MemrewriteError):
    """The model cannot be captured as a graph, or a hazard in it would make a rewrite unsafe."""

    exit_code = 3


class FixedSizeError(CaptureError):
    """A size that is to vary does not: ``told`` says why, ``fixing`` the paths of the submodules it is due to."""

    def __init__(self, message: str, told: str, fixing: Iterable[str]) -> None:
        super().__init__(message)
        self.told, self.fixing = told, tuple(sorted(fixing))


class UnfitCallError(CaptureError):
    """No graph can have the submodule at ``path`` as a call; it may have one that this is inside of."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class DataDependentError(CaptureError):
    """What a step does depends on values, so it cannot run on fake tensors."""


class NotEquivalentError(MemrewriteError):
    """A rewritten model gave other numbers than the original; nothing was returned or written."""

    exit_code = 4


class MeasurementError(MemrewriteError):
    """The device ran out of memory or the measuring process died."""

    exit_code = 5


class DoesNotFitError(MeasurementError):
    """A step takes more memory than the device has."""


class BudgetInfeasibleError(MemrewriteError):
    """No plan fits the budget.

    ``lowest`` is the lowest reachable peak in bytes, ``options`` what was tried besides (of ``outcomes.Option``),
    ``advice`` what of it fits, a sentence each; ``summary`` is the message without these.
    """

    exit_code = 6

    def __init__(
        self, message: str, lowest: int, advice: tuple[str, ...] = (), options: tuple[Option, ...] = ()
    ) -> None:
        super().__init__("\n".join([message, *advice]))
        self.summary = message
        self.lowest = lowest
        self.advice = advice
        self.options = options


class InternalError(MemrewriteError):
    """A promise between two parts of memrewrite is broken; please report it."""
