"""What ``torch.compile`` makes of a step: it casts as it reads, fuses, recomputes node by node, and holds zeros.

It fuses what it runs again and makes each node as backward asks for it: a plan counts products alone, keeps those worth
it, and divides only segments where that costs nothing. The predicted peak stays that of the uncompiled module, less
what casts to wider types take there, with gradients of zeros; the one that is measured, on a GPU, and held to the
budget there is that of the compiled module.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from memrewrite.records.errors import UsageError
from memrewrite.targets.eager import EAGER, Target
from memrewrite.targets.transients import Transients
from memrewrite.targets.zero_tangents import zero_gradients
from memrewrite.torch_internals.autograd_nodes import gives_gradient_of_leaf

_NOTE = (
    "Peaks are predicted for the model as it is, and measured for what torch.compile makes of it; its "
    'backend="memrewrite" divides what Inductor runs, where graphs break and for sizes that vary, too.'
)


@dataclass(frozen=True)
class CompiledTarget(Target):
    """What ``torch.compile`` makes of the model ``on`` a target.

    Compiled code casts to a wider type wherever that is read, so that such a tensor counts as what it is made of, and
    its backward is handed zeros as gradients of what is given besides the loss.
    """

    on: Target = EAGER
    plan: ClassVar[str] = "plan for torch.compile"
    compiles: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    on_demand: ClassVar[bool] = True
    fuses: ClassVar[bool] = True
    writes_in_place: ClassVar[bool] = False  # it finds for itself what to write in place

    @property
    def measurable(self) -> bool:
        """As there."""
        return self.on.measurable

    @property
    def of_original(self) -> Target:
        """Not compiled."""
        return self.on

    def device_type(self, lies_on: str) -> str:
        """As there."""
        return self.on.device_type(lies_on)

    def kernels(self) -> AbstractContextManager[None]:
        """As there."""
        return self.on.kernels()

    def optimizer_kernels(self) -> AbstractContextManager[None]:
        """As there."""
        return self.on.optimizer_kernels()

    def transients(self, device: torch.device, probe: bool = True) -> Transients | None:
        """As there."""
        return self.on.transients(device, probe)

    def workspace_bytes(self, device: torch.device, amp: torch.dtype | None, mode: str) -> int:
        """As there."""
        return self.on.workspace_bytes(device, amp, mode)

    def normalizes_by_kernel(self, device: torch.device) -> bool:
        """As there."""
        return self.on.normalizes_by_kernel(device)

    @property
    def rows_in_float32(self) -> bool:
        """As there."""
        return self.on.rows_in_float32

    def read_as(self, func: Any, args: Sequence[Any], result: Any) -> int:
        """What it is made of where it is that in a wider type, unless it is a leaf's gradient, which stays."""
        if func is not torch.ops.aten._to_copy.default or result.layout is not torch.strided:
            return 0
        wider = result.element_size() > args[0].element_size()
        return int(args[0].nbytes) if wider and not gives_gradient_of_leaf() else 0

    def around(self, module: nn.Module) -> AbstractContextManager[None]:
        """With the gradients of zeros."""
        return zero_gradients(module)

    def check(self, device: torch.device) -> None:
        """On CUDA alone: what compiled code allocates on the CPU cannot be tracked."""
        if device.type != "cuda":
            raise UsageError("What torch.compile makes of a model is measured on CUDA only; move the model there.")

    def prepared(self, module: nn.Module) -> nn.Module:
        """Compiled."""
        return cast(nn.Module, torch.compile(module))

    def notes(self, lies_on: str) -> tuple[str, ...]:
        """That what is measured is compiled, where it is measured."""
        return self.on.notes(lies_on) or ((_NOTE,) if lies_on == "cuda" else ())
