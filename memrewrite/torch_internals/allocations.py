"""What the caching allocator of CUDA is asked for, request by request. Read in PyTorch 2.11 to 2.15.

PyTorch records this for its memory visualizer; there is no public way to see what an operator asks for inside.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Course = tuple[int, ...]
"""Requests in order: ``n > 0`` asks for n bytes, ``-k`` gives back what the k-th request of the course got."""
_ENTRIES = 2**22  # more than any probing takes; only what is recorded takes memory


class History:
    """The requests on ``device`` since recording began. ``moment`` counts them, ``course`` gives those between two."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._count()
        self._events: list[tuple[bool, int, int]] = []  # whether it was a request, its address and its bytes

    def moment(self) -> int:
        """How many requests and releases there were."""
        return self._count() - self._start

    def read(self) -> None:
        """Take over what was recorded so far."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        for entry in torch.cuda.memory._snapshot(self._device)["device_traces"][index]:
            if entry["action"] in ("alloc", "free_requested"):
                self._events.append((entry["action"] == "alloc", entry["addr"], entry["size"]))

    def course(self, first: int, last: int) -> Course:
        """What was asked for between two moments; releases of what was there before are left out."""
        found: list[int] = []
        places: dict[int, int] = {}  # which request has an address now
        for is_request, address, size in self._events[first:last]:
            if is_request:
                found.append(size)
                places[address] = sum(step > 0 for step in found)
            elif address in places:
                found.append(-places.pop(address))
        return tuple(found)

    def _count(self) -> int:
        requests = torch.cuda.memory_stats_as_nested_dict(self._device)["allocation"]["all"]
        return int(requests["allocated"] + requests["freed"])


@contextmanager
def recorded_allocations(device: torch.device) -> Iterator[History]:
    """Record requests meanwhile. Where somebody records already, that goes on, and the history stays empty."""
    if torch._C._cuda_isHistoryEnabled():
        yield History(device)
        return
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=_ENTRIES)
    history = History(device)
    try:
        yield history
        history.read()
    finally:
        torch.cuda.memory._record_memory_history(None)
