"""Tensors of which each process has a part: ``DTensor``, and what a collective under way will give.

Looked at for every operator, so by names that need no import; the local part of either has no public spelling that
waits for nothing. Read in PyTorch 2.11 to 2.15.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memrewrite.runtime.lazy_output import made_when_used

_SPREAD = {"DTensor": "torch.distributed.tensor"}
_UNDER_WAY = {"AsyncCollectiveTensor": "torch.distributed._functional_collectives"}


def is_spread(kind: type) -> bool:
    """Whether this is the type of tensors that are spread over a mesh, whose operators run on their local parts."""
    return _is(kind, _SPREAD)


def wraps_local(kind: type) -> bool:
    """Whether operators on this type of tensors lead to operators on others, that have the storages."""
    return _is(kind, _SPREAD) or _is(kind, _UNDER_WAY)


def local_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that is spread over a mesh or sent; any other tensor itself."""
    kind = type(tensor)
    if kind.__name__ not in _SPREAD and kind.__name__ not in _UNDER_WAY:
        return tensor
    if is_spread(kind):
        return local_part(getattr(tensor, "_local_tensor", tensor))
    return getattr(tensor, "elem", tensor) if wraps_local(kind) else tensor


def computed_on(tensor: Tensor) -> torch.device:
    """Where a parameter is when it is computed with: of one that waits on the host, where its mesh is."""
    here = tensor.device
    if here.type != "cpu" or not is_spread(type(tensor)):
        return here
    kind = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    return here if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


@dataclass(frozen=True)
class Spread:
    """How a tensor is spread over a mesh: the whole one's sizes and strides, and what each process has of it."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def like(cls, tensor: Tensor) -> "Spread | None":
        """How ``tensor`` is, None where it is an ordinary one."""
        whole: Any = tensor
        if not is_spread(type(tensor)):
            return None
        return cls(whole.device_mesh, whole.placements, whole.shape, whole.stride())

    @property
    def here(self) -> torch.Size:
        """The sizes of what each process has, where these are the same."""
        sizes = [*self.shape]
        for dim, placement in enumerate(self.placements):
            if placement.is_shard():
                sizes[placement.dim] = -(-sizes[placement.dim] // self.mesh.size(dim))
        return torch.Size(sizes)

    def of(self, local: Tensor) -> Tensor:
        """A tensor spread so, of which this process has ``local``."""
        from torch.distributed.tensor import DTensor

        whole: Any = {"shape": self.shape, "stride": self.stride}
        with torch.no_grad():  # a leaf, then, as ``local`` is
            return DTensor.from_local(local, self.mesh, self.placements, run_check=False, **whole)


def is_divided(tensor: Tensor) -> bool:
    """Whether this process has a part alone of a tensor."""
    whole: Any = tensor
    return is_spread(type(tensor)) and any(each.is_shard() for each in whole.placements)


def spreads(hook: Any) -> bool:
    """Whether a hook of a module is one that ``parallelize_module`` registers, or what stands in for it here."""
    return str(getattr(hook, "__module__", "")).startswith((_SPREAD["DTensor"], "memrewrite.torch_internals.tensor_"))


def _is(kind: type, names: dict[str, str]) -> bool:
    return kind.__module__.startswith(names[kind.__name__]) if kind.__name__ in names else False


def is_sparse_or_nested(tensor: Tensor) -> bool:
    """Whether it has no memory that its sizes tell; nested tensors may have the layout of ordinary ones."""
    return tensor.layout is not torch.strided or tensor.is_nested


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the storages of ``tensor``: itself, the parts of a sparse one, or what a lazy one holds."""
    if made_when_used(type(tensor)):
        return tuple(tensor.lazily_held)  # type: ignore[attr-defined]
    tensor = local_part(tensor)
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout is torch.sparse_csr:
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    return ()
