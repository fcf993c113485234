"""The options of the back end, read once; all others are Inductor's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memrewrite.records.errors import UsageError
from memrewrite.records.loop import TUTORIAL, Loop
from memrewrite.records.options import Budget
from memrewrite.workload.stepspec import StepSpec, in_backward

OWN = ("budget", "optimizer", "reserve", "loss", "loop", "exact", "verify")


@dataclass(frozen=True)
class Asked:
    """What was asked: see ``memrewrite.backends.entry``. ``reserve`` and ``loss`` are in bytes.

    ``keeps_output``: what the model gave is there until it gives the next, as in the loop of PyTorch's tutorials.
    """

    budget: Budget | None = None
    optimizer: str = "adamw"
    reserve: int = 0
    loss: int = 0
    exact: bool = False
    verify: bool = False
    keeps_output: bool = True

    @property
    def lowest(self) -> bool:
        """Whether the lowest peak is asked for."""
        return self.budget is not None and self.budget.minimum

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> tuple["Asked", dict[str, Any]]:
        """What is memrewrite's of ``options``, and the rest; raises ``UsageError`` for a value that means nothing."""
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise UsageError(f"Options {options!r} are no dict with names as keys; write e.g. {{'budget': '8GB'}}.")
        rest = {name: value for name, value in options.items() if name not in OWN}
        budget, optimizer = options.get("budget"), options.get("optimizer", cls.optimizer) or "none"
        if not isinstance(optimizer, str):
            given = repr(optimizer).partition("\n")[0].removesuffix(" (")  # an optimizer shows itself on many lines
            raise UsageError(f"Option optimizer={given} is no name; write e.g. 'adamw' or 'module:factory'.")
        StepSpec(optimizer=optimizer).check()
        if in_backward(optimizer):
            raise UsageError(f"Option optimizer={optimizer!r} steps while backward runs, which compiled code does not.")
        flags = {name: options.get(name, False) for name in ("exact", "verify")}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise UsageError(f"Option {name}={value!r} is neither True nor False.")
        reserve, loss = (_bytes_of(name, options.get(name)) for name in ("reserve", "loss"))
        loop = Loop.parse(options.get("loop", TUTORIAL))
        if replace(loop, keeps_output=True) != Loop():
            raise UsageError(f"Option loop={str(loop)!r} has habits of which only 'drop-output' counts; use reserve=.")
        flags["keeps_output"] = loop.keeps_output
        return cls(None if budget is None else Budget.parse(budget), optimizer, reserve, loss, **flags), rest


def _bytes_of(name: str, size: Any) -> int:
    """The bytes to leave; raises ``UsageError`` for what is no number of bytes."""
    if size is None or (size == 0 and not isinstance(size, bool)):
        return 0
    try:
        found = Budget.parse(size).bytes
    except UsageError:
        found = None
    if found is None:
        raise UsageError(f"Option {name}={size!r} is no number of bytes; write e.g. '500MB'.")
    return found
