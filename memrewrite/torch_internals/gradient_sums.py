"""Which sums of gradients autograd makes in place, told under a dispatch mode, where it makes all of them anew.

Private API: autograd adds a second gradient to the first one in place if nothing else holds that, and never while a
dispatch mode is on, because a tensor may then be of a kind that it does not know (``InputBuffer::add``). How many hold
a tensor, its storage and its Python object there is measured, once for each type of device, on a gradient that nothing
else holds.
"""

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.versions import require

require("Tensor._use_count", "_C._storage_Use_Count")

SUM = torch.ops.aten.add.Tensor
"""The operator of such a sum."""


Holders = tuple[int, int, int]
"""How many hold a tensor, its storage and its Python object."""


def in_place(args: tuple[Any, ...], alone: Holders) -> bool:
    """Whether autograd adds up the two gradients that ``SUM`` is given in place, as far as one can tell from them.

    ``alone`` are the holders of a first one that is (``of_one_alone``). To be asked in ``__torch_dispatch__`` of the
    first mode. The first one has to come from a node before: what the formulas of nodes add up looks the same.
    """
    if len(args) != 2 or not isinstance(args[1], Tensor) or args[0].shape != args[1].shape:
        return False
    whole = args[0].untyped_storage().nbytes() == args[0].numel() * args[0].element_size()
    return whole and args[0].dtype == args[1].dtype and _holders(args) == alone


def _holders(args: tuple[Any, ...]) -> Holders:
    storage = args[0].untyped_storage()._cdata
    return args[0]._use_count(), torch._C._storage_Use_Count(storage), sys.getrefcount(args[0])


class _Probe(Layer):
    """Notes ``_holders`` of what autograd adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Holders] = []
        self._known: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = self.below(func, types, args, kwargs or {})
        if func is SUM:
            self.found.append(_holders(args))
        if isinstance(result, Tensor):
            self._known.append(weakref.ref(result.untyped_storage()))  # as the tracker does
        return result


def of_one_alone(device_type: str) -> Holders:
    """The holders of a gradient on such a device that nothing else holds when another one is added to it."""
    known = device_type if device_type == "cuda" and torch.cuda.is_available() else "cpu"
    if known not in _ALONE:
        with torch.inference_mode(False), torch.enable_grad(), _Probe() as probe:
            leaf = torch.ones(2, requires_grad=True, device=known)
            doubled = leaf * 2.0
            torch.autograd.grad((doubled.exp() * doubled.cos()).sum(), leaf)  # of which neither gradient is kept
        (_ALONE[known],) = probe.found
    return _ALONE[known]


_ALONE: dict[str, Holders] = {}
