"""Where tensors lie on a CUDA device: in which blocks of PyTorch's caching allocator, and what is free beside them.

A model that was made in one type and turned into another there, or loaded in parts, leaves holes between its
parameters, and a block that was free before may be up to 1 MiB larger than what lies in it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.spread import parts_of


@dataclass(frozen=True)
class Standing:
    """A block of ``size`` bytes that stands before the first step, free or not; ``given`` asked for so many of them.

    They are 0 where it is free, or something else lies in it.
    """

    size: int
    free: bool
    given: int = 0


@dataclass(frozen=True)
class Segment:
    """What the driver gave the allocator at once, for small or large blocks, and the blocks it has now, in order."""

    address: int
    small: bool
    blocks: tuple[Standing, ...]


Layout = tuple[Segment, ...]


def layout_of(tensors: Iterable[Tensor]) -> Layout:
    """The segments of the current stream that real tensors on CUDA lie in; none where there is no such tensor.

    Nor by an allocator that is not PyTorch's own, of which none is known.
    """
    given = dict(_addresses(tensors))
    if not given or not _is_known():
        return ()
    device = next(iter(given))[0]
    found = torch.cuda.memory_snapshot()
    stream = torch.cuda.current_stream(device).cuda_stream
    here = [each for each in found if (each["device"], each["stream"]) == (device, stream)]
    read = ((each, tuple(_blocks(each, device, given))) for each in here)
    return tuple(
        Segment(each["address"], each["segment_type"] == "small", blocks)
        for each, blocks in read
        if any(block.given for block in blocks)
    )


def bytes_of_blocks(tensors: Iterable[Tensor]) -> int:
    """What the allocator counts for the storages of ``tensors`` on CUDA: whole blocks, where there are any."""
    given = dict(_addresses(tensors))
    if not given or not _is_known():
        return sum(given.values())
    blocks = ((each["device"], block) for each in torch.cuda.memory_snapshot() for block in each["blocks"])
    return sum(block["size"] for device, block in blocks if (device, block["address"]) in given)


def _is_known() -> bool:
    return torch.cuda.get_allocator_backend() == "native"


def _addresses(tensors: Iterable[Tensor]) -> Iterator[tuple[tuple[int, int], int]]:
    """Device and address of each storage on CUDA, and its bytes."""
    for part in (part for tensor in tensors for part in parts_of(tensor)):
        if part.is_cuda and part.layout is torch.strided and not isinstance(part, FakeTensor):
            storage = part.untyped_storage()
            yield (part.device.index, storage.data_ptr()), storage.nbytes()


def _blocks(segment: dict[str, Any], device: int, given: dict[tuple[int, int], int]) -> Iterator[Standing]:
    for block in segment["blocks"]:
        free = block["state"] == "inactive"
        yield Standing(block["size"], free, 0 if free else given.get((device, block["address"]), 0))
