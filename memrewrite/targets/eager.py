"""The target that changes nothing, of which the others differ: eager PyTorch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from memrewrite.runtime.batch_norm import kernel_runs_on
from memrewrite.targets import workspaces
from memrewrite.targets.cuda_scratch import Scratch
from memrewrite.targets.transients import Transients, transients_on
from memrewrite.torch_internals.foreach import foreach_on_fake_tensors


@dataclass(frozen=True)
class Target:
    """Eager PyTorch on the device that the tensors lie on.

    ``plan`` is what a plan for it is called. ``compiles`` says that something is made of the model before it runs;
    ``exact`` that a simulation tells what a step takes; ``on_demand`` that what a segment computes again is computed
    node by node, as it is read; ``fuses`` that nodes run together in one kernel, so that neither their times add up nor
    the order of their requests is known; ``writes_in_place`` that an operator writes where it is told to.
    """

    plan: ClassVar[str] = "plan"
    compiles: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    on_demand: ClassVar[bool] = False
    fuses: ClassVar[bool] = False
    writes_in_place: ClassVar[bool] = True

    @property
    def measurable(self) -> bool:
        """Whether a step can be measured where its tensors lie."""
        return True

    @property
    def of_original(self) -> "Target":
        """Where the model runs as it is."""
        return self

    def device_type(self, lies_on: str) -> str:
        """The type of the device that a step is planned for, by that of the one its tensors lie on."""
        return lies_on

    def moves(self, lies_on: str) -> bool:
        """Whether what lies on such a device is copied to another one for a step."""
        return self.device_type(lies_on) != lies_on

    def kernels(self) -> AbstractContextManager[None]:
        """Let fake tensors in this thread run what real ones would."""
        return nullcontext()

    def optimizer_kernels(self) -> AbstractContextManager[None]:
        """Let optimizers choose for fake parameters what they would choose for real ones."""
        return foreach_on_fake_tensors()

    def transients(self, device: torch.device, probe: bool = True) -> Transients | None:
        """What operators take while they run on ``device``: measured there, or with ``probe`` False by their sources.

        None where that is nothing.
        """
        return Scratch() if device.type == "cuda" and not probe else transients_on(device)

    def workspace_bytes(self, device: torch.device, amp: torch.dtype | None, mode: str) -> int:
        """Bytes that libraries hold on ``device`` once a step of ``mode`` under ``amp`` has run there."""
        return workspaces.measured(device, amp, mode)

    def normalizes_by_kernel(self, device: torch.device) -> bool:
        """Whether batch normalizations can apply statistics that were kept by our own kernel."""
        return kernel_runs_on(device)

    @property
    def rows_in_float32(self) -> bool:
        """Whether normalizations keep the statistics of rows in float32 where the tensors' own device would not."""
        return False

    def read_as(self, func: Any, args: Sequence[Any], result: Any) -> int:
        """The bytes that the result of an operator counts as; 0 for its own."""
        return 0

    def around(self, module: nn.Module) -> AbstractContextManager[None]:
        """Let steps of ``module`` hold what they would besides what its operators make."""
        return nullcontext()

    def check(self, device: torch.device) -> None:
        """Raise ``UsageError`` where a step cannot be measured on ``device``."""

    def prepared(self, module: nn.Module) -> nn.Module:
        """What runs in place of ``module``."""
        return module

    def notes(self, lies_on: str) -> tuple[str, ...]:
        """What a report of figures for this target has to say of them; ``lies_on`` as in ``device_type``."""
        return ()


EAGER = Target()
