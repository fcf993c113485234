"""CUDA, planned on tensors that lie on the CPU: what runs on fake ones runs as it does there (``cuda_kernels``).

What runs on real tensors runs on the CPU as ever.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from memrewrite.targets.cuda_kernels import as_cuda
from memrewrite.targets.cuda_scratch import Scratch
from memrewrite.targets.eager import Target
from memrewrite.targets.transients import Transients
from memrewrite.targets.workspaces import library_bytes
from memrewrite.torch_internals.foreach import foreach_on_fake_tensors

STATED_ERROR = "47 steps measured on H200s took at most 1.7 % more or less"  # tests/benchmarks/RESULTS.md
_NOTE = (
    f"The figures are predicted for CUDA without it ({STATED_ERROR}; convolution workspaces are not in them); "
    "equivalence was judged on the CPU, where the result runs: optimize again where CUDA is."
)


@dataclass(frozen=True)
class CudaFromCpu(Target):
    """Eager PyTorch on CUDA, for tensors on the CPU."""

    @property
    def measurable(self) -> bool:
        """No: the device is not there."""
        return False

    def device_type(self, lies_on: str) -> str:
        """CUDA."""
        return "cuda"

    def kernels(self) -> AbstractContextManager[None]:
        """Those of CUDA."""
        return as_cuda()

    def optimizer_kernels(self) -> AbstractContextManager[None]:
        """Those for parameters on CUDA."""
        return foreach_on_fake_tensors(on_cpu=True)

    def transients(self, device: torch.device, probe: bool = True) -> Transients | None:
        """By the sources of the kernels."""
        return Scratch()

    def workspace_bytes(self, device: torch.device, amp: torch.dtype | None, mode: str) -> int:
        """By PyTorch's sources, on a Hopper device."""
        return library_bytes(mode)

    def normalizes_by_kernel(self, device: torch.device) -> bool:
        """As on CUDA."""
        return True

    @property
    def rows_in_float32(self) -> bool:
        """As on CUDA."""
        return True

    def notes(self, lies_on: str) -> tuple[str, ...]:
        """How far predictions without CUDA were off."""
        return (_NOTE,)


CUDA_FROM_CPU = CudaFromCpu()
