"""Room on a CUDA device for a step that fragments memory. Torch only; part of every artifact."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_SIMULATED: ContextVar[Callable[[int], None] | None] = ContextVar("_SIMULATED", default=None)


def make_room(wanted: int, *inputs: Tensor) -> None:
    """Return cached memory to the device if this process may not reserve ``wanted`` bytes on it.

    That is what PyTorch's caching allocator reserves for a step, at most, when it starts with what earlier steps left
    in pieces; a step that starts with nothing cached takes less. Where there is room for ``wanted``, nothing is done.
    """
    if torch.compiler.is_compiling():
        return
    if (simulated := _SIMULATED.get()) is not None:
        simulated(wanted)
        return
    device = next((tensor.device for tensor in inputs if tensor.is_cuda), None)
    if device is None or torch.cuda.is_current_stream_capturing():
        return
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    if min(allowed, torch.cuda.memory_reserved(device) + free) < wanted:
        torch.cuda.empty_cache()


@contextmanager
def room_simulated(make: Callable[[int], None]) -> Iterator[None]:
    """Let ``make`` stand for the device within."""
    token = _SIMULATED.set(make)
    try:
        yield
    finally:
        _SIMULATED.reset(token)
