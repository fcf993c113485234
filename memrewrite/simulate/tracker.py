"""Counts the bytes of tensor storages from birth to death, on real tensors and on fake ones alike."""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.private import FakeTensor, TorchDispatchMode

GRANULE = 512  # bytes; the CUDA caching allocator rounds every allocation up to a multiple of it


def rounded(size: int) -> int:
    """``size`` bytes as the CUDA allocator counts them: the next multiple of 512."""
    return -(-size // GRANULE) * GRANULE


class _Block(weakref.ref[torch.UntypedStorage]):
    """One storage, held weakly: its bytes and category, and between which ticks of the tracker's clock it lived."""

    __slots__ = ("born", "category", "died", "key", "nbytes", "size")
    key: int
    nbytes: int
    size: int
    category: str
    born: float
    died: float


class Tracker(TorchDispatchMode):
    """While it is active, every storage an operator makes on ``device_type`` is counted until it is freed.

    ``current`` and ``peak`` are bytes; ``events`` lists (bytes in use, label) after each operator that made a storage.
    No tensor is kept alive. Storages from before count once they are given to ``register``.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.current = 0
        self.peak = 0
        self.events: list[tuple[int, str]] = []
        self._label = ""
        self._labels: dict[Any, str] = {}
        self._category = ""
        self._clock = 0
        self._peak_clock = 0
        self._live: dict[int, _Block] = {}
        self._blocks: list[_Block] = []

    def register(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count the storages of ``tensors`` as ``category``, also those that were counted as something else."""
        for tensor in tensors:
            block = self._see(tensor)
            if block is not None:
                block.category = category

    def begin(self, label: str, category: str) -> None:
        """From here on, storages are born as ``category`` and events are labelled ``label: operator``."""
        self._label, self._category, self._labels = label, category, {}

    def mark(self, label: str) -> None:
        """Add an event between operators."""
        self.events.append((self.current, label))

    def reset_peak(self) -> None:
        """Forget the peak so far: ``peak`` and ``categories`` speak of what follows."""
        self.peak, self._peak_clock = self.current, self._clock
        self._blocks = list(self._live.values())

    def categories(self) -> dict[str, int]:
        """Bytes in use at the peak by category; they sum to ``peak``."""
        totals: dict[str, int] = {}
        for block in self._blocks:
            if block.size and block.born <= self._peak_clock <= block.died:
                totals[block.category] = totals.get(block.category, 0) + block.size
        return totals

    def living(self) -> dict[str, int]:
        """Bytes in use now by category."""
        totals: dict[str, int] = {}
        for block in list(self._live.values()):
            totals[block.category] = totals.get(block.category, 0) + block.size
        return totals

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        clock = self._clock
        result = func(*args, **(kwargs or {}))
        self._see_all(result)
        if self._clock != clock:
            label = self._labels.get(func)
            if label is None:
                label = self._labels[func] = f"{self._label}: {func}"
            self.events.append((self.current, label))
        return result

    def _see_all(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, list | tuple):
            for item in result:
                self._see_all(item)

    def _see(self, tensor: Tensor) -> _Block | None:
        """The block of a tensor's storage, counted now if it is new; None on other devices and without a storage."""
        if tensor.layout is not torch.strided:
            return None  # the indices and values of a sparse tensor were counted as they were made
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        block = self._live.get(id(storage))
        if block is not None:
            if block.nbytes == nbytes:
                return block
            self._died(block)  # resized in place: from here on a block of another size
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self.device_type:
            return None
        return self._born(storage, nbytes)

    def _born(self, storage: torch.UntypedStorage, nbytes: int) -> _Block:
        self._clock += 1
        block = _Block(storage, self._died)
        block.key, block.nbytes, block.size, block.category = id(storage), nbytes, rounded(nbytes), self._category
        block.born, block.died = self._clock, math.inf
        self._live[block.key] = block
        self._blocks.append(block)
        self.current += block.size
        if self.current > self.peak:
            self.peak, self._peak_clock = self.current, self._clock
        return block

    def _died(self, block: _Block) -> None:
        """Called as the storage goes, before its id can be used again; and when a storage changes its size."""
        if self._live.get(block.key) is block:
            del self._live[block.key]
            block.died = self._clock
            self.current -= block.size
