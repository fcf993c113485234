"""A storage that a tracker counts, what is told of it, and what operators did to such storages, to be done again."""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

from memrewrite.targets.allocator import Block
from memrewrite.targets.transients import Taken


@dataclass(frozen=True)
class Life:
    """One storage: in use at the events numbered ``born`` to ``died - 1``, where ``died`` may be their count.

    ``bytes`` are rounded up to 512, or those of a block. ``module`` is the path of the submodule that made it or, for a
    gradient or optimizer state, whose parameter it belongs to; "" is the module itself, None what lies outside (inputs,
    the loss). ``operator`` is the label of its birth, ``step 1 forward: aten.relu.default``, without an operator where
    it was there before.
    """

    born: int
    died: int
    bytes: int
    category: str
    module: str | None
    operator: str


class Counted(weakref.ref[Any]):
    """One storage, or what stands for it, held weakly.

    Its bytes and category, and between which ticks of the tracker's clock it lived; ``events`` are those it saw, as in
    ``Life``. ``node`` of autograd's made it, None outside of backward.
    """

    __slots__ = (
        "born",
        "category",
        "died",
        "events",
        "func",
        "given",
        "key",
        "label",
        "module",
        "nbytes",
        "node",
        "size",
    )
    key: int
    nbytes: int
    size: int
    category: str
    born: float
    died: float
    module: str | None
    label: str
    func: Any
    node: int | None
    events: tuple[int, int | None]
    given: Block | None  # by the allocator


class Stand:
    """Stands for a storage that lives for a while."""

    __slots__ = ("__weakref__",)


# Not frozen, which would take three times as long to make; there are thousands in a pass.
@dataclass(slots=True)
class Birth:
    """A storage to be counted; ``inner`` says that a backward inside of what runs now made it."""

    storage: Any
    nbytes: int
    inner: bool


@dataclass(slots=True)
class Ran:
    """An operator that ran: the storages it made, what it took, and that to which a gradient was ``added``, if any.

    ``place`` is the submodule that it belongs to, where that was followed.
    """

    func: Any
    made: tuple[Counted, ...]
    taken: Taken
    added: Counted | None
    place: str | None


Log = list[Ran | Counted]
"""Operators as they ran, and storages as they died."""
INNER = -1  # the number of no node of autograd's

# What cuBLAS computes, by name; convolutions are cuDNN's, attention and norms PyTorch's own.
_BLAS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "_addmm_activation"}
_BLAS |= {"_scaled_mm", "_grouped_mm", "_int_mm", "_scaled_grouped_mm"}


@functools.cache
def by_cublas(func: Any) -> bool:
    """Whether cuBLAS computes an operator."""
    return getattr(func, "__name__", "").partition(".")[0] in _BLAS
