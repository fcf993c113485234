"""Custom ``autograd.Function`` calls on fake tensors, also of Functions that fake tensors cannot run through.

Kernels of other languages ask for the memory of what they are given. Such a Function is seen once on real tensors of
the same sizes (see ``trials``), and stands in by that afterwards. One that runs on fake tensors does so.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memrewrite.records.errors import CaptureError
from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.fake.launches import launched_on_fakes
from memrewrite.simulate.fake.trials import Argument, Given, Made, Plain, Seen, made_again, tried
from memrewrite.torch_internals.custom_functions import Methods, custom_functions, methods_replaced
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.pytrees import tensors_in, tree_flatten, tree_leaves
from memrewrite.torch_internals.tracing import APART, size_at, value_at
from memrewrite.torch_internals.triton_kernels import launches_replaced

_ATTRIBUTE = "memrewrite_seen"  # of a context

# By class and arguments.
_SEEN: WeakKeyDictionary[type, dict[Given, Seen]] = WeakKeyDictionary()


@contextmanager
def functions_on_fakes() -> Iterator[None]:
    """Meanwhile custom Functions run on fake tensors if they can, else as they were seen on real ones.

    Outside of them, launches of Triton's kernels are operators.
    """
    originals = custom_functions()
    with (
        methods_replaced({kind: _on_fakes(kind, originals) for kind in originals}),
        launches_replaced(launched_on_fakes),
    ):
        yield


def _on_fakes(kind: type, originals: dict[type, Methods]) -> Methods:
    """The methods of a class that get along with fake tensors."""
    own = originals[kind]
    standing: list[tuple[Seen, list[Tensor]]] = []  # of the forward that ended last, where its context is set up apart

    @functools.wraps(own.forward)  # PyTorch asks for its signature
    def forward(*args: Any) -> Any:
        given = args if own.setup_context else args[1:]
        tensors = tensors_in(given)
        seen = _seen(kind, given, originals)
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
        found = made_again(seen.gradients, [*context.saved_tensors, *gradients])
        _take(seen.took[1], seen.device)
        return tuple(found)

    return Methods(forward, backward, setup_context if own.setup_context else None)


def _seen(kind: type, args: tuple[Any, ...], originals: dict[type, Methods]) -> Seen | None:
    """What the Function did on such arguments, None where it is to see to them itself; raises what it raised."""
    if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args)):
        return None
    seen = _seen_at(kind, args, 0, originals)
    if seen is None or not _varying(args, 1):
        return None if seen is None or seen.on_fakes else seen
    if not seen.on_fakes:
        return _at_any_size(kind, args, 1, originals, seen)
    for step in (APART, 1):  # it would fix those that it goes through, row by row say
        with suppress(Exception):  # whatever it says of such sizes
            return _at_any_size(kind, args, step, originals, seen)
    return None


def _at_any_size(kind: type, args: tuple[Any, ...], step: int, originals: dict[type, Methods], seen: Seen) -> Seen:
    """The same where sizes vary, by what it did at others."""
    further, varying = _seen_at(kind, args, step, originals, seen.on_fakes), _varying(args, step)
    try:
        pairs = zip(seen.results, further.results if further else (), strict=True)
        results = tuple(varied(pair, lambda were: same_size(were, varying)) for pair in pairs)
    except (AttributeError, LookupError, ValueError):
        raise CaptureError(f"What {kind.__name__} gives for other sizes is like none of its arguments.") from None
    return replace(seen, results=results, kept=(), held=(), gradients=(), took=(0, 0))  # only traced, not simulated


def _seen_at(
    kind: type, args: tuple[Any, ...], step: int, originals: dict[type, Methods], on_fakes: bool = False
) -> Seen | None:
    """What it did where sizes that vary are those they were traced with (0), or others; ``on_fakes`` or not at all."""
    given, known = _in_words(args, step), _SEEN.setdefault(kind, {})
    try:
        hash(given)
    except TypeError:  # an argument that nothing can be remembered for
        return None
    if given not in known:
        with methods_replaced(originals), launches_replaced(None):
            known[given] = tried(kind, given, on_fakes)
    return known[given]


def _in_words(args: tuple[Any, ...], step: int) -> Given:
    leaves, tree = tree_flatten(args)
    numbers: dict[int, int] = {}
    words: list[Argument | Plain] = []
    device = torch.device("cpu")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            device = leaf.device
            number = numbers.setdefault(id(leaf), len(numbers))
            shape, stride = (tuple(size_at(size, step) for size in sizes) for sizes in (leaf.shape, leaf.stride()))
            words.append(Argument(number, TensorLike(shape, stride, leaf.dtype, device), *_role(leaf)))
        else:
            plain = value_at(leaf, step)
            words.append(Plain(type(plain), plain))
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return Given(tuple(words), tree, str(tree), autocast)


def _role(leaf: Tensor) -> tuple[bool, bool]:
    """Whether it has a gradient, and whether it is a parameter."""
    return leaf.requires_grad, leaf.requires_grad and isinstance(leaf, nn.Parameter)


def _varying(args: tuple[Any, ...], step: int) -> dict[tuple[int, ...], list[torch.SymInt]]:
    """The sizes that vary in arguments, and the numbers of rows of what lies in rows, by what they were in tries."""
    found: dict[tuple[int, ...], list[torch.SymInt]] = {}
    for leaf in tree_leaves(args):
        sizes = numbers_of_rows(leaf.shape) if isinstance(leaf, Tensor) else [leaf]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                found.setdefault((size_at(size, 0), size_at(size, step)), []).append(size)
    return found


def numbers_of_rows(shape: Sequence[Any]) -> list[Any]:
    """The sizes, and how many rows there are of each further one."""
    return [*shape, *itertools.accumulate(shape, operator.mul)]


def varied(each: Sequence[Any], size: Callable[[tuple[int, ...]], Any]) -> Any:
    """A result for sizes that vary, from several tries; ``size`` gives what was these sizes in them, or raises."""
    first, further = each[:2]
    if all(other == first for other in each):
        return first
    likes = [other.like for other in each]
    if None in likes or (first.number, first.size, further.size) != (None, None, None):
        raise ValueError("A view of an argument.")
    like, other = first.like, further.like
    shape = tuple(map(size, zip(*(each.shape for each in likes), strict=True)))
    order = sorted(range(len(shape)), key=lambda i: (other.stride[i], other.shape[i]))
    strides: dict[int, Any] = {}
    extent, now = 1, 1
    for i in order:
        if like.stride[i] == other.stride[i] == 0:  # expanded
            strides[i] = 0
            continue
        if other.stride[i] != now and other.shape[i] != 1:
            raise ValueError(f"Strides {other.stride}.")
        strides[i], extent, now = extent, extent * shape[i], now * other.shape[i]
    return Made(replace(like, shape=shape, stride=tuple(strides[i] for i in range(len(shape)))))


def same_size(were: tuple[int, ...], varying: Mapping[tuple[int, ...], Sequence[torch.SymInt]]) -> Any:
    """The size that was these; asked whether several that were are one, tracing takes them for one from then on."""
    if len({*were}) == 1:
        return were[0]
    size, *others = varying[were]
    if not all(size == other for other in others):
        raise ValueError(f"Sizes {size} and {others}.")
    return size


def _results(seen: Seen, tensors: list[Tensor]) -> list[Any]:
    """Fake results, of tensors of which some are written."""
    for number in seen.written:
        tensors[number].zero_()
    return made_again(seen.results, tensors)


def _set_up(context: Any, seen: Seen, tensors: list[Tensor], results: list[Any]) -> None:
    setattr(context, _ATTRIBUTE, seen)
    context.mark_dirty(*(tensors[i] for i in seen.marked if any(each is tensors[i] for each in results)))
    context.mark_non_differentiable(*(results[i] for i in seen.plain))
    given = [*tensors, *(each for each in results if isinstance(each, Tensor))]
    kept = made_again(seen.kept, given)
    context.save_for_backward(*kept)
    context.memrewrite_held = made_again(seen.held, [*given, *kept])
    _take(seen.took[0], seen.device)


def _take(count: int, device: torch.device) -> None:
    """Ask for so many bytes, for a moment."""
    torch.empty(count, dtype=torch.uint8, device=device)
