"""What the CUDA runtime of PyTorch lets nobody else do. Read in PyTorch 2.11 to 2.15; a CPU build lacks both."""

import torch

_CYCLES_PER_MS = 2_000_000  # of a clock of 2 GHz, which no device exceeds by much


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS handles hold in the caching allocator; the next product allocates them anew.

    Only where CUDA is: a CPU build of PyTorch lacks the function.
    """
    torch._C._cuda_clearCublasWorkspaces()


def keep_device_busy(ms: float) -> None:
    """Let the current CUDA device do nothing for at least ``ms`` milliseconds, while the CPU goes on.

    PyTorch has this for its own tests; whatever else takes as long takes memory, too, or has its own price.
    """
    torch.cuda._sleep(int(ms * _CYCLES_PER_MS))
