"""Tensors of which each process has a part: ``DTensor``, and what a collective under way will give.

Looked at for every operator, so by names that need no import; the local part of either has no public spelling that
waits for nothing. Read in PyTorch 2.11 to 2.15.
"""

from typing import Any

from torch import Tensor

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


def spread_like(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor spread as ``tensor`` is, of which this process has ``local``."""
    from torch.distributed.tensor import DTensor

    whole: Any = tensor
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _is(kind: type, names: dict[str, str]) -> bool:
    return kind.__module__.startswith(names[kind.__name__]) if kind.__name__ in names else False
