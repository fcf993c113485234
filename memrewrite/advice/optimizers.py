"""The same optimizer by kernels whose step takes fewer bytes."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from memrewrite.workload.optimizers import OptimizerFactory, one_of
from memrewrite.workload.step import Step

_SHORT = {torch.optim.Adam: "adam-fused", torch.optim.AdamW: "adamw-fused"}
_FUSED = "the same update by kernels that round otherwise, no slower"
_ONE_BY_ONE = "the same update, one parameter after another: slower where there are many"


@dataclass(frozen=True)
class Frugal:
    """A factory of what ``make`` makes, of the class ``name``, with one kernel for each update or without ``foreach``.

    By default PyTorch updates all parameters at once on CUDA (``foreach``), with temporaries as large as they are.
    """

    make: OptimizerFactory
    name: str
    fused: bool

    @property
    def setting(self) -> str:
        """What to pass to the class."""
        return "fused=True" if self.fused else "foreach=False"

    @property
    def advice(self) -> str:
        """What to do, also on the command line where that has a name for it."""
        short = next((short for known, short in _SHORT.items() if self.make is known), None)
        return f"{self.name} with {self.setting}" + (f" (--optimizer {short})" if short else "")

    @property
    def cost(self) -> str:
        """What that changes."""
        return _FUSED if self.fused else _ONE_BY_ONE

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer, set so."""
        made = one_of(self.make(parameters))
        for group in made.param_groups:
            group["foreach"] = False
            if self.fused:
                group["fused"] = True
        return made


def frugal(module: nn.Module, step: Step) -> Frugal | None:
    """That factory for the step's optimizer of the module; None where it has no such setting, or has it already."""
    made = step.make_optimizer(module)
    if step.optimizer is None or made is None:
        return None
    group = made.param_groups[0]
    if group.get("fused") or "foreach" not in group:
        return None
    if "fused" not in group and group["foreach"] is False:
        return None
    return Frugal(step.optimizer, type(made).__name__, "fused" in group)
