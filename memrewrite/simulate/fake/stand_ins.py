"""Custom ``autograd.Function`` classes on fake tensors, also those that need real ones: kernels in Triton, NumPy.

Once for each kind of arguments a Function is tried on fake tensors; where it does not run on them, it runs on real ones
of random numbers. Both happen in a thread that none of the modes around reaches. What it gave, kept, wrote and handed
back, and how many bytes it took besides while it ran, as far as PyTorch's operators asked for them, is what it then
does on fake tensors.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.state.random_state import preserved_rng
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.custom_functions import Methods, custom_functions, kept_as_attributes, methods_replaced
from memrewrite.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from memrewrite.torch_internals.pytrees import tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True)
class _Same:
    """The tensor of this number among those that were given and, after them, the results."""

    number: int


_Made = _Same | TensorLike
_ATTRIBUTE = "memrewrite_seen"  # of a context
T = TypeVar("T")


@dataclass(frozen=True)
class _Argument:
    """A tensor that is given: which, as one may be given twice, what it is like, and whether it has a gradient."""

    number: int
    like: TensorLike
    trained: bool


@dataclass(frozen=True)
class _Plain:
    """Anything else that is given; True is no 1."""

    kind: type
    value: Any


@dataclass(frozen=True)
class _Given:
    """Arguments in words, leaf by leaf; ``autocast`` is the type that autocast was on for, None where it was off."""

    leaves: tuple[_Argument | _Plain, ...]
    tree: Any = field(compare=False)
    nesting: str  # the same as text
    autocast: torch.dtype | None


@dataclass(frozen=True)
class _Seen:
    """What a Function did: its results, those of them that have no gradient, what it kept, and the arguments it wrote.

    What it ``held`` as attributes of its context stays there whatever is computed again. ``gradients`` are what its
    backward gives, for each argument; ``took`` are the bytes that forward and backward took besides.
    """

    results: tuple[Any, ...]
    several: bool
    plain: tuple[int, ...]
    kept: tuple[_Made, ...]
    held: tuple[_Made, ...]
    written: tuple[int, ...]
    gradients: tuple[TensorLike | None, ...]
    took: tuple[int, int]
    device: torch.device


# By class and arguments; None where it runs on fake tensors.
_SEEN: WeakKeyDictionary[type, dict[_Given, _Seen | None]] = WeakKeyDictionary()
_TRYING: ContextVar[bool] = ContextVar("_TRYING", default=False)


@contextmanager
def functions_on_fakes() -> Iterator[None]:
    """Meanwhile custom Functions run on fake tensors if they can, else as they were seen on real ones."""
    with methods_replaced({kind: _on_fakes(kind, methods) for kind, methods in custom_functions().items()}):
        yield


def _on_fakes(kind: type, own: Methods) -> Methods:
    """The methods of a class that get along with fake tensors."""
    standing: list[tuple[_Seen, list[Tensor]]] = []  # of the forward that ended last, where its context is set up apart

    def forward(*args: Any) -> Any:
        given = args if own.setup_context else args[1:]
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        seen = _seen(kind, given, tensors)
        if seen is None:
            result = own.forward(*args)
            standing.clear()
            return result
        results = _results(seen, tensors)
        if own.setup_context:
            standing[:] = [(seen, tensors)]
        else:
            _set_up(args[0], seen, tensors, results)
        return tuple(results) if seen.several else results[0]

    def setup_context(context: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if standing:
            seen, tensors = standing.pop()
            _set_up(context, seen, tensors, list(output) if seen.several else [output])
        elif own.setup_context:
            own.setup_context(context, inputs, output)

    def backward(context: Any, *gradients: Any) -> Any:
        seen = getattr(context, _ATTRIBUTE, None)
        if seen is None:
            return own.backward(context, *gradients)
        _ = context.saved_tensors  # as its own would ask for them
        found = tuple(None if like is None else _empty(like) for like in seen.gradients)
        _take(seen.took[1], seen.device)
        return found

    return Methods(forward, backward, setup_context if own.setup_context else None)


def _seen(kind: type, args: tuple[Any, ...], tensors: list[Tensor]) -> _Seen | None:
    """What the Function did on such arguments, None where it can see to them itself; raises what it raised."""
    sizes = (size for tensor in tensors for size in tensor.shape)
    if _TRYING.get() or not any(isinstance(t, FakeTensor) for t in tensors) or any(map(_varies, sizes)):
        return None
    given, known = _in_words(args), _SEEN.setdefault(kind, {})
    try:
        hash(given)
    except TypeError:  # an argument that nothing can be remembered for
        return None
    if given not in known:
        known[given] = _apart(lambda: _tried(kind, given))
    return known[given]


def _varies(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _results(seen: _Seen, tensors: list[Tensor]) -> list[Any]:
    """Fake results, of tensors of which some are written."""
    for number in seen.written:
        tensors[number].zero_()
    return [_made(each, tensors) if isinstance(each, _Same | TensorLike) else each for each in seen.results]


def _set_up(context: Any, seen: _Seen, tensors: list[Tensor], results: list[Any]) -> None:
    setattr(context, _ATTRIBUTE, seen)
    context.mark_dirty(*(tensors[i] for i in seen.written if any(each is tensors[i] for each in results)))
    context.mark_non_differentiable(*(results[i] for i in seen.plain))
    given = [*tensors, *(each for each in results if isinstance(each, Tensor))]
    context.save_for_backward(*(_made(each, given) for each in seen.kept))
    context.memrewrite_held = [_made(each, given) for each in seen.held]
    _take(seen.took[0], seen.device)


def _take(count: int, device: torch.device) -> None:
    """Ask for so many bytes, for a moment."""
    torch.empty(count, dtype=torch.uint8, device=device)


def _made(what: _Made, given: Sequence[Tensor]) -> Tensor:
    return given[what.number] if isinstance(what, _Same) else _empty(what)


def _empty(like: TensorLike) -> Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)


def _in_words(args: tuple[Any, ...]) -> _Given:
    leaves, tree = tree_flatten(args)
    numbers: dict[int, int] = {}
    words: list[_Argument | _Plain] = []
    device = "cpu"
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            device = leaf.device.type
            number = numbers.setdefault(id(leaf), len(numbers))
            words.append(_Argument(number, TensorLike.of(leaf), leaf.requires_grad))
        else:
            words.append(_Plain(type(leaf), leaf))
    enabled = torch.is_autocast_enabled(device)
    return _Given(tuple(words), tree, str(tree), torch.get_autocast_dtype(device) if enabled else None)


def _apart(run: Callable[[], T]) -> T:
    """What ``run`` gives in a thread of its own, where no mode is on."""
    found: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        _TRYING.set(True)
        try:
            found.append(run())
        except BaseException as error:  # handed on below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return found[0]


def _tried(kind: Any, given: _Given) -> _Seen | None:
    arguments = {leaf.number: leaf for leaf in given.leaves if isinstance(leaf, _Argument)}
    device = arguments[0].like.device
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        preserved_rng([torch.empty(0, device=device)]),
        torch.autocast(device.type, given.autocast) if given.autocast is not None else nullcontext(),
    ):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                fakes = {n: _empty(argument.like).requires_grad_(argument.trained) for n, argument in arguments.items()}
                _observed(kind, given, fakes, device)
        except Exception:  # whatever it says of fake tensors, real ones tell
            return _observed(kind, given, {n: _random(argument) for n, argument in arguments.items()}, device)
    return None


def _random(argument: _Argument) -> Tensor:
    """A real tensor of numbers between 0 and 1, or of whole zeros."""
    tensor = argument.like.filled(0)
    if tensor.is_floating_point():
        tensor.uniform_()
    return tensor.requires_grad_(argument.trained)


def _observed(kind: Any, given: _Given, bases: dict[int, Tensor], device: torch.device) -> _Seen:
    """What the Function does on these tensors, by number."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    # Autograd lets no leaf be written.
    tensors = {n: base.clone() if base.requires_grad else base for n, base in bases.items()}
    versions = {n: tensor._version for n, tensor in tensors.items()}
    leaves = [tensors[leaf.number] if isinstance(leaf, _Argument) else leaf.value for leaf in given.leaves]
    args = tree_unflatten(leaves, given.tree)
    tracker = Tracker(device.type)
    tracker.register(tensors.values(), "given")
    tracker.reset_peak()
    with tracker, saved_tensors_hooks(pack, lambda tensor: tensor):
        output = kind.apply(*args)
    took = max(0, tracker.peak - tracker.current)
    results = list(output) if isinstance(output, tuple) else [output]
    before = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = [leaf.number for leaf in given.leaves if isinstance(leaf, _Argument)]
    after = [*before, *(each for each in results if isinstance(each, Tensor))]
    gradients, took_back = _gradients(args, [t for t in after[len(before) :] if t.requires_grad], tracker)
    return _Seen(
        results=tuple(_likeness(each, before) if isinstance(each, Tensor) else each for each in results),
        several=isinstance(output, tuple),
        plain=tuple(i for i, each in enumerate(results) if isinstance(each, Tensor) and not each.requires_grad),
        kept=tuple(_likeness(tensor, after) for tensor in kept),
        held=tuple(_likeness(tensor, after) for tensor in kept_as_attributes(output)),
        written=tuple(i for i, n in enumerate(numbers) if tensors[n]._version != versions[n]),
        gradients=gradients,
        took=(took, took_back),
        device=device,
    )


def _gradients(
    args: tuple[Any, ...], results: list[Tensor], tracker: Tracker
) -> tuple[tuple[TensorLike | None, ...], int]:
    """The likeness of what backward gives for each argument, and the bytes that it takes besides."""
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    if not wanted or not results:
        return (None,) * len(args), 0
    ones = [torch.ones_like(result) for result in results]
    tracker.reset_peak()
    before = tracker.current
    with tracker:
        gradients = torch.autograd.grad(results, wanted, ones, allow_unused=True)
    found = iter(gradients)
    given = [next(found) if isinstance(arg, Tensor) and arg.requires_grad else None for arg in args]
    made = sum(rounded(each.nbytes) for each in gradients if each is not None)
    likes = tuple(None if each is None else TensorLike.of(each) for each in given)
    return likes, max(0, tracker.peak - before - made)


def _likeness(tensor: Tensor, among: Sequence[Tensor]) -> _Made:
    """Which of those the tensor is, else what it is like."""
    for number, other in enumerate(among):
        same = other.untyped_storage() is tensor.untyped_storage()
        if same and (other.shape, other.stride(), other.dtype) == (tensor.shape, tensor.stride(), tensor.dtype):
            return _Same(number)
    return TensorLike.of(tensor)
