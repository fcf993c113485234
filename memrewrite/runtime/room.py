"""Room on a CUDA device for a step that fragments memory. Torch only; part of every artifact."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_ROOM_SIMULATED: ContextVar[Callable[[int], None] | None] = ContextVar("_ROOM_SIMULATED", default=None)
_UNIT, _LEAST = 2 * 2**20, 10 * 2**20  # bytes: such pieces are multiples of the one and no smaller than the other
_NEARLY = 0.95  # of the total is enough: for tensors of up to 1 MiB PyTorch gets other memory


def missing(total: int, reserved: int) -> int:
    """The bytes to ask for in one piece where a process has ``reserved`` of ``total``, 0 for so few that none is."""
    lacking = total - reserved
    return 0 if lacking < _LEAST or reserved > _NEARLY * total else lacking // _UNIT * _UNIT


def make_room(total: int, *inputs: Tensor) -> None:
    """Let PyTorch hold ``total`` bytes of the device, and of those that it has not given out as many as can be at once.

    It gets them otherwise as tensors ask for memory, each piece as large as that tensor is. Where a smaller tensor then
    takes a part of a piece, no larger one can have it, and PyTorch asks for yet another. In one piece, what is freed
    becomes one with what is free beside it.

    Where PyTorch holds as much already, nothing is done, so it is done once; ``torch.cuda.max_memory_allocated`` then
    says ``total`` at most. Where the device, or what this process may take of it, has less, cached memory is returned
    and that is all.
    """
    if torch.compiler.is_compiling():
        return
    if (simulated := _ROOM_SIMULATED.get()) is not None:
        simulated(total)
        return
    device = next((tensor.device for tensor in inputs if tensor.is_cuda), None)
    if device is None or torch.cuda.is_current_stream_capturing() or not _missing_on(device, total):
        return
    torch.cuda.empty_cache()
    try:
        piece = torch.cuda.caching_allocator_alloc(_missing_on(device, total), device)
    except torch.OutOfMemoryError:
        return
    torch.cuda.caching_allocator_delete(piece)


def _missing_on(device: torch.device, total: int) -> int:
    return missing(total, torch.cuda.memory_reserved(device))


@contextmanager
def room_simulated(make: Callable[[int], None]) -> Iterator[None]:
    """Let ``make`` stand for the device within."""
    token = _ROOM_SIMULATED.set(make)
    try:
        yield
    finally:
        _ROOM_SIMULATED.reset(token)
