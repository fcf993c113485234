"""What a custom ``autograd.Function`` does, seen once on real tensors like those that it is given.

What it saves, returns, writes and gives back, and how many bytes it takes besides while it runs, as far as PyTorch's
operators take them.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memrewrite.process.thread import apart
from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.state.bits import same_bits
from memrewrite.state.random_state import preserved_rng
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.cuda import clear_cublas_workspaces
from memrewrite.torch_internals.custom_functions import kept_as_attributes
from memrewrite.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from memrewrite.torch_internals.logs import quiet
from memrewrite.torch_internals.pytrees import tree_unflatten

T = TypeVar("T")


@dataclass(frozen=True)
class Made:
    """A tensor: one that there was, or what is ``like`` this, in the memory of one that there was or in its own.

    ``number`` says which there was, ``offset`` where it begins in the memory, in elements from where that one does.
    Its own memory has ``size`` elements; None where it fills it.
    """

    like: TensorLike | None = None
    number: int | None = None
    offset: int = 0
    size: int | None = None

    @classmethod
    def of(cls, tensor: Tensor, there: Sequence[Any]) -> "Made":
        """What ``tensor`` is, where these were before it."""
        like, whole, offset = TensorLike.of(tensor), tensor.untyped_storage(), int(tensor.storage_offset())
        beside = [(n, t) for n, t in enumerate(there) if isinstance(t, Tensor) and t.untyped_storage() is whole]
        for number, other in beside:
            if (TensorLike.of(other), other.storage_offset()) == (like, offset):
                return cls(number=number)
        for number, other in beside:
            if other.dtype == tensor.dtype:
                return cls(like, number, offset - int(other.storage_offset()))
        size = whole.nbytes() // tensor.itemsize
        return cls(like) if not offset and size == like.extent else cls(like, None, offset, size)

    def tensor(self, there: Sequence[Any]) -> Tensor:
        """Such a tensor, where these are before it."""
        like = self.like
        if like is None:
            found: Tensor = there[self.number or 0]
            return found
        if self.number is not None:
            base: Tensor = there[self.number]
            return base.as_strided(like.shape, like.stride, base.storage_offset() + self.offset)
        if self.size is None:
            return like.empty()
        whole = torch.empty(self.size, dtype=like.dtype, device=like.device)
        return whole.as_strided(like.shape, like.stride, self.offset)

    @property
    def bytes(self) -> int:
        """What its memory takes if it is its own."""
        if self.like is None or self.number is not None:
            return 0
        return rounded(self.like.dtype.itemsize * (self.like.extent if self.size is None else self.size))


def made_of(leaves: Iterable[Any], there: Sequence[Any]) -> tuple[Any, ...]:
    """What each tensor is, where these and those in front of it were before it; all else is what it is."""
    known, found = list(there), []
    for leaf in leaves:
        found.append(Made.of(leaf, known) if isinstance(leaf, Tensor) else leaf)
        known.append(leaf)
    return tuple(found)


def made_again(found: Iterable[Any], there: Sequence[Any]) -> list[Any]:
    """The leaves that ``made_of`` told of."""
    known = list(there)
    before = len(known)
    for leaf in found:
        known.append(leaf.tensor(known) if isinstance(leaf, Made) else leaf)
    return known[before:]


@dataclass(frozen=True)
class Argument:
    """A tensor that is given: which, as one may be given twice, what it is like, and whether it has a gradient.

    Of a ``parameter``, autocast keeps what it casts it to.
    """

    number: int
    like: TensorLike
    trained: bool
    parameter: bool


@dataclass(frozen=True)
class Plain:
    """Anything else that is given; True is no 1."""

    kind: type
    value: Any


@dataclass(frozen=True)
class Given:
    """Arguments in words, leaf by leaf; ``autocast`` is the type that autocast was on for, None where it was off."""

    leaves: tuple[Argument | Plain, ...]
    tree: Any = field(compare=False)
    nesting: str  # the same as text
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Seen:
    """What a Function did: its results, those of them that have no gradient, what it kept, and the arguments it wrote.

    Some are ``written`` in its backward, or by kernels that tell nobody; ``marked`` are those that forward told of.
    What it ``held`` as attributes of its context stays there whatever is computed again. ``gradients`` are what its
    backward gives for each argument, where what it kept and what came in were before; ``took`` are the bytes that
    forward and backward took besides. One that runs ``on_fakes`` need not be stood in for.
    """

    results: tuple[Any, ...]
    several: bool
    plain: tuple[int, ...]
    kept: tuple[Made, ...]
    held: tuple[Made, ...]
    written: tuple[int, ...]
    marked: tuple[int, ...]
    gradients: tuple[Made | None, ...]
    took: tuple[int, int]
    device: torch.device
    on_fakes: bool = False


def tried(kind: type, given: Given, on_fakes: bool = False) -> Seen:
    """What the Function does on such arguments, on real ones where fakes are not enough, or raises what it raises."""
    try:
        return apart(lambda: _tried(kind, given, on_fakes))
    finally:
        if torch.cuda.is_initialized():  # that thread has a cuBLAS workspace, which would stay beside the model's
            torch.cuda.synchronize()
            clear_cublas_workspaces()


def _tried(kind: Any, given: Given, on_fakes: bool) -> Seen:
    arguments = {leaf.number: leaf for leaf in given.leaves if isinstance(leaf, Argument)}
    device = arguments[0].like.device
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        preserved_rng([torch.empty(0, device=device)]),
        torch.autocast(device.type, given.autocast) if given.autocast is not None else nullcontext(),
    ):
        try:
            with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
                fakes = {n: Made(each.like).tensor(()).requires_grad_(each.trained) for n, each in arguments.items()}
                return replace(_observed(kind, given, fakes, device), on_fakes=True)
        except Exception:  # whatever it says of fake tensors, real ones tell
            if on_fakes:
                raise
            return _observed(kind, given, {n: _random(argument) for n, argument in arguments.items()}, device)


def _random(argument: Argument) -> Tensor:
    """A real tensor of numbers between 0 and 1, or of whole zeros."""
    tensor = argument.like.filled(0)
    if tensor.is_floating_point():
        tensor.uniform_()
    return tensor.requires_grad_(argument.trained)


def _observed(kind: Any, given: Given, bases: dict[int, Tensor], device: torch.device) -> Seen:
    """What the Function does on these tensors, by number."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    # Autograd lets no leaf be written, and autocast keeps casts of leaves alone.
    parameters = {leaf.number for leaf in given.leaves if isinstance(leaf, Argument) and leaf.parameter}
    tensors = {n: t.clone() if t.requires_grad and n not in parameters else t for n, t in bases.items()}
    written = _Written(tensors)
    leaves = [tensors[leaf.number] if isinstance(leaf, Argument) else leaf.value for leaf in given.leaves]
    args = tree_unflatten(leaves, given.tree)
    tracker = Tracker(device.type)
    tracker.register(tensors.values(), "given")
    tracker.reset_peak()
    with tracker, saved_tensors_hooks(pack, lambda tensor: tensor):
        output = kind.apply(*args)
        torch.clear_autocast_cache()  # which ends with the region, and counts until then as what it took besides
        took = max(0, tracker.peak - tracker.current)
    told = written.told()
    results = list(output) if isinstance(output, tuple) else [output]
    before = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = [leaf.number for leaf in given.leaves if isinstance(leaf, Argument)]
    after = [*before, *(each for each in results if isinstance(each, Tensor))]
    gradients, took_back = _gradients(args, results, kept, tracker)
    changed = written.changed()
    return Seen(
        results=made_of(results, before),
        several=isinstance(output, tuple),
        plain=tuple(i for i, each in enumerate(results) if isinstance(each, Tensor) and not each.requires_grad),
        kept=made_of(kept, after),
        held=made_of(kept_as_attributes(output), [*after, *kept]),
        written=tuple(i for i, n in enumerate(numbers) if n in changed),
        marked=tuple(i for i, n in enumerate(numbers) if n in told),
        gradients=gradients,
        took=(took, took_back),
        device=device,
    )


class _Written:
    """Which of these tensors are written: kernels that are not PyTorch's tell nobody, so that bits are compared."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        self._tensors = tensors
        self._versions = {n: tensor._version for n, tensor in tensors.items()}
        self._before = {n: t.detach().clone() for n, t in tensors.items() if not isinstance(t, FakeTensor)}

    def told(self) -> set[int]:
        """The numbers of those that PyTorch knows of."""
        return {n for n, tensor in self._tensors.items() if tensor._version != self._versions[n]}

    def changed(self) -> set[int]:
        """The numbers of all."""
        return self.told() | {n for n, t in self._before.items() if not same_bits(t, self._tensors[n].detach())}


def _gradients(
    args: tuple[Any, ...], results: list[Any], kept: list[Tensor], tracker: Tracker
) -> tuple[tuple[Made | None, ...], int]:
    """What backward gives for each argument, and the bytes that it takes besides."""
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    coming = [torch.ones_like(each) if isinstance(each, Tensor) and each.requires_grad else None for each in results]
    pairs = [(each, one) for each, one in zip(results, coming, strict=True) if one is not None]
    if not wanted or not pairs:
        return (None,) * len(args), 0
    tracker.reset_peak()
    before = tracker.current
    with tracker:
        found = iter(torch.autograd.grad([p[0] for p in pairs], wanted, [p[1] for p in pairs], allow_unused=True))
    given = [next(found) if isinstance(arg, Tensor) and arg.requires_grad else None for arg in args]
    made = made_of(given, [*kept, *coming])
    new = sum(each.bytes for each in made if each is not None)
    return made, max(0, tracker.peak - before - new)
