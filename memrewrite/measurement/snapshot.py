"""Everything that a run may change of some modules, kept bit for bit and put back."""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.measurement.ahead import on_cpu
from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.state.attributes import Attributes
from memrewrite.state.random_state import RandomState
from memrewrite.torch_internals.autograd_nodes import is_view
from memrewrite.torch_internals.spread import local_part
from memrewrite.workload.step import Inputs
from memrewrite.workload.surroundings import Surroundings

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@dataclass
class _Bytes:
    """A copy of a storage, which may end meanwhile as it would if nobody looked: then there is another in its place.

    ``saved`` are its bytes from ``start`` on, of ``size`` in all.
    """

    storage: weakref.ref[Any]
    device: torch.device
    saved: Any
    start: int
    size: int

    def restored(self) -> Any:
        """The storage, as it was."""
        storage = self.storage()
        if storage is None:
            storage = torch.UntypedStorage(self.size, device=self.device)
            self.storage = weakref.ref(storage)
        if storage.nbytes() != self.size:
            storage.resize_(self.size)
        count = self.saved.nbytes()
        _bytes_in(storage, self.start, count).copy_(_bytes_in(self.saved, 0, count))
        return storage


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: in which storage, by number, and how."""

    storage: int
    dtype: torch.dtype
    layout: tuple[Any, torch.Size, tuple[int, ...]]  # offset, sizes, strides

    @classmethod
    def of(cls, tensor: Tensor) -> "_Place":
        """That of a tensor."""
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return cls(id(tensor.untyped_storage()), tensor.dtype, layout)

    def tensor(self, storage: Any) -> Tensor:
        """A tensor that lies there."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)


class State:
    """Parameters, buffers, other attributes, gradients, flags and random state of some modules, bit for bit.

    ``inputs`` are tensors that count as well; so does what the modules' code and ``loss_fn`` may write to. Bytes are
    kept on the CPU or, ``near``, where they lie, one copy per storage, and of those that inputs alone lie in no more
    than these span; ``.grad`` tensors are kept by reference, and memory that is replaced (``parameter.data = ...``) is
    not kept from ending.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        devices: tuple[torch.device, ...],
        inputs: Iterable[Tensor] = (),
        loss_fn: Callable[..., Any] | None = None,
        *,
        near: bool = False,
    ) -> None:
        self._near = near
        self._attributes = Attributes(*modules)
        self._surroundings = Surroundings(modules, loss_fn)
        # Itself, where it lies or an alias, requires_grad, grad.
        self._tensors: dict[int, tuple[Tensor, _Place | Tensor, bool, Tensor | None]] = {}
        self._bytes: dict[int, _Bytes] = {}
        for tensor in tensors_of(*modules):
            self._keep(tensor, {})
        given = [tensor for tensor in inputs if id(tensor) not in self._tensors]
        spans = _spans(given)
        for tensor in given:
            self._keep(tensor, spans)
        self._devices, self._generators = devices, RandomState(devices)

    def _keep(self, tensor: Tensor, spans: Mapping[int, tuple[int, int]]) -> None:
        grad = tensor.grad if tensor.is_leaf else None
        place = _Place.of(tensor) if _is_plain(tensor) else tensor.detach()
        self._tensors[id(tensor)] = (tensor, place, tensor.requires_grad, grad)
        tensor = local_part(tensor)
        if not _has_memory(tensor):
            return  # a sparse buffer is kept by reference: no module writes one in place
        storage: Any = tensor.untyped_storage()
        if id(storage) not in self._bytes:
            start, end = spans.get(id(storage), (0, storage.nbytes()))
            near = self._near or storage.device.type == "cpu"
            if end - start < storage.nbytes():
                part = _bytes_in(storage, start, end - start)
                saved = (part.clone() if near else part.cpu()).untyped_storage()
            else:
                saved = storage.clone() if near else on_cpu(storage)
            self._bytes[id(storage)] = _Bytes(weakref.ref(storage), storage.device, saved, start, storage.nbytes())

    def restore(self) -> None:
        """Put everything back, in place, into the same objects."""
        self._attributes.restore()
        self._surroundings.restore()
        storages = {key: kept.restored() for key, kept in self._bytes.items()}
        for tensor, place, requires_grad, grad in self._tensors.values():
            if tensor.grad_fn is not None and requires_grad is False and not is_view(tensor):
                tensor.detach_()  # a buffer updated in place from activations carries their graph
            alias = place.tensor(storages[place.storage]) if isinstance(place, _Place) else place
            if _lies_elsewhere(tensor, alias):
                tensor.data = alias
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad
        self._generators.restore()

    def bring_to_cpu(self) -> None:
        """Keep bytes on the CPU from now on, also those of what ``restarted`` made of this."""
        for kept in self._bytes.values():
            kept.saved = kept.saved if kept.saved.device.type == "cpu" else on_cpu(kept.saved)

    def bring_back(self) -> None:
        """Keep bytes where they lie again, as far as there is room, if they were kept there before."""
        for kept in self._bytes.values():
            if self._near and kept.saved.device != kept.device:
                try:
                    near: Any = torch.UntypedStorage(kept.saved.nbytes(), device=kept.device)
                except torch.OutOfMemoryError:
                    return
                kept.saved = near.copy_(kept.saved)

    def drawn_from(self, record: Mapping[tuple[str, str], Any]) -> bool:
        """Whether PyTorch's random state is no longer that of here in what a step recorded of it."""
        kept = self._generators.torch
        return any(not torch.equal(record["random state", device], state) for device, state in kept.items())

    def clear_gradients(self) -> None:
        """Set every kept ``.grad`` to None; ``restore`` brings them back."""
        for tensor, *_ in self._tensors.values():
            if tensor.is_leaf:
                tensor.grad = None

    def restarted(self) -> "State":
        """The state right after ``restore``, with the gradients and the random state of now; no bytes are copied."""
        other = copy.copy(self)
        other._tensors = {
            key: (tensor, place, requires_grad, tensor.grad if tensor.is_leaf else None)
            for key, (tensor, place, requires_grad, _) in self._tensors.items()
        }
        other._generators = RandomState(self._devices)
        return other


def _spans(tensors: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """The first of the bytes of each storage that lies in one of these tensors, and the end of the last."""
    spans: dict[int, tuple[int, int]] = {}
    for tensor in filter(_has_memory, map(local_part, tensors)):
        key, start = id(tensor.untyped_storage()), int(tensor.storage_offset()) * tensor.itemsize
        end = start + TensorLike.of(tensor).extent * tensor.itemsize
        first, last = spans.get(key, (start, end))
        spans[key] = min(first, start), max(last, end)
    return spans


def _bytes_in(storage: Any, start: int, count: int) -> Tensor:
    """So many bytes of a storage, as a tensor on them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (count,), (1,))


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is its bytes: not sparse, nor on the meta device, where fake copies forbid asking for any."""
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is what its memory says, and nothing else."""
    plain = type(tensor) in _PLAIN and _has_memory(tensor) and not tensor.is_inference()
    return plain and not (tensor.is_conj() or tensor.is_neg())


def _lies_elsewhere(tensor: Tensor, alias: Tensor) -> bool:
    """Whether a tensor was given other memory, or other sizes, than it had when ``alias`` was made of it."""
    if not _has_memory(tensor):
        return False
    now, then = local_part(tensor), local_part(alias)
    return (now.data_ptr(), now.shape, now.stride()) != (then.data_ptr(), then.shape, then.stride())


def cuda_devices(modules: tuple[nn.Module, ...], inputs: Inputs) -> tuple[torch.device, ...]:
    """The CUDA devices that hold a parameter, a buffer or an input."""
    tensors = [*inputs.tensors()]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    return tuple(sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str))
