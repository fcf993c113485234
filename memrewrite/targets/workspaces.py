"""What libraries allocate on the device besides tensors, measured there.

cuBLAS gets its workspace from PyTorch's caching allocator, one per handle and stream and for good; a handle belongs to
a thread, so the forward pass and the autograd engine's device thread hold one each. How large it is depends on the
device and on the versions, so a tiny step is run to read what stays allocated. cuBLASLt, which adds biases, has one
per handle, too, where PyTorch does not give it cuBLAS's: that of autograd's thread is asked for where a product with a
bias runs again in backward, as in checkpoint segments.
"""

import functools
import gc

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memrewrite.torch_internals.cuda import clear_cublas_workspaces

_WIDTH = 64
_MIB = 2**20
_CUBLAS, _CUBLASLT = 32 * _MIB, _MIB


def library_bytes(mode: str) -> int:
    """What cuBLAS and cuBLASLt hold in a step of ``mode``: a workspace of each per thread that multiplies.

    32 MiB each on Hopper (``parseChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``; 8.1 MiB on
    earlier devices) for the forward pass and for autograd's thread, and 1 MiB of cuBLASLt, which adds biases.
    """
    return (_CUBLAS + _CUBLASLT) * (2 if mode == "train" else 1)


def library_requests(size: int, mode: str) -> tuple[list[int], list[int]]:
    """The requests that ``size`` bytes of libraries are in a step of ``mode``, of the forward pass and of backward."""
    share = size // (2 if mode == "train" else 1)
    own = min(_CUBLASLT, share)
    requests = [each for each in (share - own, own) if each]
    return requests, requests if mode == "train" else []


@functools.cache
def measured(device: torch.device, amp: torch.dtype | None = None, mode: str = "train", biases: bool = True) -> int:
    """Bytes that stay allocated on ``device`` once a step of ``mode`` under ``amp`` has run there; 0 on the CPU.

    Without ``biases`` no product of the step adds one. Measured in this process the first time, then remembered. What
    libraries hold is freed before, so that they ask for it, and after.
    """
    if device.type != "cuda":
        return 0
    clear_cublas_workspaces()
    with torch.random.fork_rng([device]), torch.inference_mode(False), torch.enable_grad():
        size = _allocated_by_libraries(device, amp, mode, biases)
    clear_cublas_workspaces()
    return size


def _allocated_by_libraries(device: torch.device, amp: torch.dtype | None, mode: str, biases: bool) -> int:
    """Run a tiny step on ``device`` in this process and return the bytes that outlive its tensors."""
    before = torch.cuda.memory_allocated(device)
    _tiny_step(device, amp, mode, biases)
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


def _tiny_step(device: torch.device, amp: torch.dtype | None, mode: str, biases: bool) -> None:
    """Products with and without a bias, which take different library paths; in training also again, in backward."""
    biased = nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=biases), nn.Sigmoid()).to(device)  # whose own result is kept
    plain = nn.Linear(_WIDTH, _WIDTH, bias=False).to(device)
    x = torch.zeros(_WIDTH, _WIDTH, device=device)
    with torch.autocast(device.type, amp, enabled=amp is not None):
        hidden = checkpoint(biased, x, use_reentrant=False, preserve_rng_state=False)
        loss = (plain(hidden) @ x).float().sum()
    if mode == "train":
        loss.backward()
