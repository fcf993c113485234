"""Copies on the CPU of what lies on a GPU, which a thread may make before they are asked for."""

import contextlib
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.torch_internals.spread import local_part

_Begun = dict[int, tuple["weakref.ref[Any]", "Future[Any]"]]  # by the identity of a storage
_begun: ContextVar[_Begun | None] = ContextVar("_begun", default=None)


def on_cpu(storage: Any) -> Any:
    """A copy of a storage on a GPU; the one that was begun, if so."""
    here, copied = (_begun.get() or {}).get(id(storage), (None, None))
    if here is None or copied is None or here() is not storage:
        return _copied(storage)
    return copied.result()


@contextlib.contextmanager
def copied_ahead(module: nn.Module) -> Iterator[None]:
    """Copy all that a module has on GPUs beside what is done meanwhile; what is not begun when that ends is not copied.

    Nothing may be written there meanwhile that was not copied by ``on_cpu`` before, and is put back.
    """
    tensors = [tensor for tensor in map(local_part, tensors_of(module)) if tensor.is_cuda]
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors if t.layout == torch.strided)}
    streams = {device: torch.cuda.Stream(device) for device in {storage.device for storage in storages.values()}}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))  # for what was asked of it until now

    def copied(here: "weakref.ref[Any]") -> Any:
        if (storage := here()) is None:
            return None
        with torch.cuda.stream(streams[storage.device]):
            return _copied(storage)

    with ThreadPoolExecutor(1, thread_name_prefix="memrewrite copies") as pool:
        kept = {key: weakref.ref(storage) for key, storage in storages.items()}
        del tensors, storages  # whose memory may end
        before = _begun.set({key: (here, pool.submit(copied, here)) for key, here in kept.items()})
        try:
            yield
        finally:
            _begun.reset(before)
            pool.shutdown(cancel_futures=True)


def _copied(storage: Any) -> Any:
    """In memory that all threads have touched, without which one gets it page by page as it copies."""
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").zero_()
    theirs = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return memory.copy_(theirs).untyped_storage()  # of tensors, whose copies let other threads run meanwhile
