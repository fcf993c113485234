"""A training step in words, as the command line and a measuring process name it, and the ``Step`` it means.

PyTorch is imported by ``build`` alone, so that ``--help`` stays fast.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memrewrite.records.errors import UsageError
from memrewrite.records.loop import TUTORIAL, Loop
from memrewrite.records.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from memrewrite.workload.optimizers import OptimizerFactory
    from memrewrite.workload.step import Step

MODES = ("train", "inference")
OPTIMIZERS = (
    *("none", "sgd", "sgd-momentum", "adam", "adam-fused", "adam-grouped", "adamw", "adamw-fused", "adamw-grouped"),
)
IN_BACKWARD = "-in-backward"
"""Ends the name of an optimizer, also of the user's own, that steps while backward runs."""
AMP = ("off", "bf16", "fp16")


@dataclass(frozen=True)
class StepSpec:
    """How one step is taken, by name.

    ``optimizer`` is one of ``OPTIMIZERS`` or ``module:factory`` (called with the parameters), also with ``IN_BACKWARD``
    after it, ``loss`` is ``module:fn`` (called with the model's output) or None for the default loss, ``amp`` one of
    ``AMP``; ``micro_batches`` is that of ``Step``, ``loop`` what ``Loop.parse`` reads, ``mesh`` what ``Mesh.parse``
    does.
    """

    mode: Literal["train", "inference"] = "train"
    optimizer: str = "adamw"
    loss: str | None = None
    amp: str = "off"
    micro_batches: int = 1
    loop: str = TUTORIAL
    mesh: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepSpec":
        """The inverse of ``to_json``."""
        return cls(**data)

    def check(self) -> None:
        """Raise ``UsageError`` for a name that means nothing, as far as that shows before PyTorch is imported."""
        if self.mode not in MODES:
            raise UsageError(f"Mode {self.mode!r} is unknown; choose {_choices(MODES)}.")
        _check_amp(self.amp)
        _check_optimizer(self.optimizer)
        if self.loss is not None:
            _split(self.loss, "loss")

    def build(self) -> "Step":
        """The step itself; raises ``UsageError`` for a name that means nothing."""
        from memrewrite.workload.step import Step
        from memrewrite.workload.stepping import checked

        self.check()
        loss = None if self.loss is None else named(self.loss, "loss")
        optimizer, amp = optimizer_factory(self.optimizer), amp_dtype(self.amp)
        mesh = None if self.mesh is None else Mesh.parse(self.mesh).of_mode(self.mode)
        how: dict[str, Any] = {"micro_batches": self.micro_batches, "loop": Loop.parse(self.loop), "mesh": mesh}
        return checked(Step(self.mode, optimizer, loss, amp, in_backward=in_backward(self.optimizer), **how))


def in_backward(name: str) -> bool:
    """Whether that optimizer takes its step while backward runs."""
    return name.endswith(IN_BACKWARD)


def optimizer_factory(name: str) -> "OptimizerFactory | None":
    """The factory that ``name`` means, None for ``none``; raises ``UsageError`` for an unknown one.

    For an optimizer that steps while backward runs it is that of the same as a whole.
    """
    _check_optimizer(name)
    name = name.removesuffix(IN_BACKWARD)
    import torch

    from memrewrite.workload.in_groups import making_groups

    factories: dict[str, OptimizerFactory | None] = {
        "none": None,
        "sgd": torch.optim.SGD,
        "sgd-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
        "adam": torch.optim.Adam,
        "adam-fused": functools.partial(torch.optim.Adam, fused=True),
        "adam-grouped": making_groups(torch.optim.Adam),
        "adamw": torch.optim.AdamW,
        "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
        "adamw-grouped": making_groups(torch.optim.AdamW),
    }
    return factories[name] if name in factories else named(name, "optimizer")


def amp_dtype(name: str) -> "torch.dtype | None":
    """The autocast dtype that ``name`` means, None for ``off``; raises ``UsageError`` for an unknown one."""
    _check_amp(name)
    import torch

    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def named(text: str, what: str) -> Callable[..., Any]:
    """The callable at ``module:name``, looked up in the current folder too.

    ``what`` it is for names it in the ``UsageError`` raised when there is no such callable.
    """
    place, attribute = _split(text, what)
    folder = str(Path.cwd())
    added = [] if folder in sys.path else [folder]
    sys.path += added
    try:
        value: Any = importlib.import_module(place)
        for name in attribute.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"The {what} {text!r} cannot be found: {error}; check the module and the name.") from error
    finally:
        for entry in added:
            with contextlib.suppress(ValueError):  # the imported code may have changed the path itself
                sys.path.remove(entry)
    if not callable(value):
        raise UsageError(f"The {what} {text!r} is of type {type(value).__name__}, which cannot be called.")
    return value


def _check_optimizer(name: str) -> None:
    whole = name.removesuffix(IN_BACKWARD)
    if whole != name and (whole == "none" or whole.endswith("-grouped")):
        raise UsageError(f"Optimizer {name!r} means nothing: {whole} takes no step that could be while backward runs.")
    name = whole
    if ":" in name:
        _split(name, "optimizer")
    elif name not in OPTIMIZERS:
        raise UsageError(f"Optimizer {name!r} is unknown; choose {_choices(OPTIMIZERS)} or give module:factory.")


def _check_amp(name: str) -> None:
    if name not in AMP:
        raise UsageError(f"Precision {name!r} is unknown; choose {_choices(AMP)}.")


def _split(text: str, what: str) -> tuple[str, str]:
    place, _, attribute = text.rpartition(":")
    if not place or not attribute:
        raise UsageError(f"The {what} {text!r} is not of the form module:function.")
    return place, attribute


def _choices(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
