"""What works piece by piece does the same for the memory each time: its operators run once, and are counted again.

A layer's MLP in tiles runs some hundred operators forward and backward, as do those of all other layers, in every step
and candidate; a loss with its head, some rows of logits at a time, runs thousands. On fake tensors that takes longer
than all else of a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memrewrite.runtime import attention, cross_entropy, linear_cross_entropy, tiles
from memrewrite.runtime.segment import autocast_dtype
from memrewrite.simulate.fake.trials import Made, made_again, made_of
from memrewrite.simulate.memory.counted import Birth, Counted, Log, Stand, by_cublas
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.transients import NOTHING, Taken
from memrewrite.torch_internals.autograd_nodes import backward_number
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.pytrees import TreeSpec, tree_flatten, tree_unflatten

# Functions of tensors that give tensors, and do nothing else.
_PIECEWISE: tuple[tuple[Any, str], ...] = (
    (tiles._Tiles, "run"),
    (tiles._Tiles, "slopes"),
    (attention, "_attended"),
    (attention, "_attention_slopes"),
    (cross_entropy, "_losses_of_some"),
    (cross_entropy, "_slope_of_some"),
    (linear_cross_entropy, "_early"),
    (linear_cross_entropy, "_late"),
    (linear_cross_entropy, "_late_slopes"),
    (linear_cross_entropy, "_head_losses_of_some"),
    (linear_cross_entropy, "_slope_by_losses"),
    (linear_cross_entropy, "_slope_at_once"),
)
# They compute with what they detach, view or cast first: autocast, which keeps casts of leaves alone, keeps none.
_LEAFLESS = {getattr(owner, name) for owner, name in _PIECEWISE if owner in (cross_entropy, linear_cross_entropy)}
_LEAFLESS |= {tiles._Tiles.run}
_PLAIN = {int, float, bool, str, type(None), torch.dtype}
_CHAIN = "chain_"  # begins the names of functions that say what they compute


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """An operator: the bytes of each storage it made, and whether a backward inside made it; ``added`` is a number."""

    func: Any
    made: tuple[tuple[int, bool], ...]
    taken: Taken
    added: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What happened: operators, and the numbers of storages that died; ``kept`` are those of results, by number."""

    course: tuple[_Step | int, ...]
    results: tuple[Any, ...]
    tree: TreeSpec
    kept: dict[int, int]


_KNOWN: dict[Any, _Known | None] = {}  # by function and arguments; None where it is to run each time


@process_wide
@contextmanager
def repeated(trackers: Sequence[Tracker]) -> Iterator[None]:
    """Meanwhile these functions run once for arguments that are alike, and the trackers are told what they did then."""
    with in_place_of_pieces(lambda own: _repeating(own, trackers)):
        yield


@process_wide
@contextmanager
def in_place_of_pieces(instead: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile what ``instead`` makes of each of these functions runs in its place."""
    with ExitStack() as stack:
        for owner, name in _PIECEWISE:
            own = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, functools.wraps(own)(instead(own))))
        yield


def told(
    own: Callable[..., Any], args: tuple[Any, ...], device_type: str
) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """What tells a call of such a function apart, and the tensors it is given; None where it is to run each time."""
    words, tensors = [own, device_type, *ambient(device_type)], list[Tensor]()
    apart = own not in _LEAFLESS and casts_are_kept(device_type)
    ordinary = not apart and _say(args, words, tensors)
    return (tuple(words), tensors) if ordinary else None


def _repeating(own: Callable[..., Any], trackers: Sequence[Tracker]) -> Callable[..., Any]:
    first = trackers[0]

    def run(*args: Any) -> Any:
        if first.on_host or (call := told(own, args, first.device_type)) is None:
            return own(*args)
        words, tensors = call
        asked = *words, first.table
        if asked not in _KNOWN:
            return _noted(asked, own, args, tensors, first)
        known = _KNOWN[asked]
        return own(*args) if known is None else _again(known, tensors, trackers)

    return run


def casts_are_kept(device_type: str) -> bool:
    """Whether autocast may keep casts for later, or have kept them before; it does not in segments and pieces."""
    return autocast_dtype(device_type) is not None and torch.is_autocast_cache_enabled()


def ambient(device_type: str) -> tuple[Any, ...]:
    """What operators depend on besides their arguments."""
    kernels = torch.backends.cuda
    attending = kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()
    return torch.is_grad_enabled(), torch.get_default_dtype(), autocast_dtype(device_type), *attending


def _say(value: Any, words: list[Any], tensors: list[Tensor]) -> bool:
    """Add what tells arguments apart, and the tensors among them; False where something is out of the ordinary."""
    kind = type(value)
    if kind is FakeTensor:
        if value.layout is not torch.strided or value.constant is not None or value.is_neg() or value.is_conj():
            return False
        whole = value.untyped_storage()
        same = next((i for i, t in enumerate(tensors) if t is value), -1)
        beside = next((i for i, t in enumerate(tensors) if t.untyped_storage() is whole), -1)
        ahead = value.storage_offset() - tensors[beside].storage_offset() if beside >= 0 else None
        place = ahead, whole.nbytes(), value.fake_device, same, beside
        words += (value.dtype, value.shape, value.stride(), value.requires_grad, value.is_leaf, place)
        tensors.append(value)
        return True
    if kind in _PLAIN:
        words += (kind, value)
        return True
    if issubclass(kind, tuple | list):
        words += (kind, len(value))
        return all(_say(each, words, tensors) for each in value)
    if kind is dict:
        return _say(tuple(value.items()), words, tensors)
    if kind is tiles._Tiles:
        words.append(kind)
        return all(_say(getattr(value, f.name), words, tensors) for f in dataclasses.fields(value))
    words.append(getattr(value, "__name__", ""))
    return callable(value) and words[-1].startswith(_CHAIN)


def _noted(asked: Any, own: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor], tracker: Tracker) -> Any:
    """Run it, and remember what it did."""
    now, versions = backward_number(), [tensor._version for tensor in tensors]
    log: Log = []
    outer, tracker.log = tracker.log, log
    try:
        results = own(*args)
    finally:
        tracker.log = outer
        if outer is not None:
            outer += log
    unchanged = versions == [tensor._version for tensor in tensors]
    _KNOWN[asked] = _known(log, results, tensors, tracker, now) if unchanged else None
    return results


def _known(log: Log, results: Any, tensors: list[Tensor], tracker: Tracker, now: int | None) -> _Known | None:
    """What happened; None where that is more than operators that give these results."""
    leaves, tree = tree_flatten(results)
    numbers: dict[int, int] = {}
    course: list[_Step | int] = []
    living: set[int] = set()
    for entry in log:
        if isinstance(entry, Counted):
            if (number := numbers.get(id(entry))) is not None:  # else it is none of these
                if entry() is not None:  # it changed its size
                    return None
                living.discard(number)
                course.append(number)
            continue
        added = None
        if entry.added is not None and (added := numbers.get(id(entry.added))) is None:
            return None
        if torch.Tag.data_dependent_output in entry.func.tags:
            return None
        for block in entry.made:
            numbers[id(block)] = len(numbers)
            living.add(numbers[id(block)])
        living.discard(-1 if added is None else added)
        if entry.made or entry.taken != NOTHING or by_cublas(entry.func):  # else it does nothing to what is counted
            made = tuple((block.nbytes, block.node != now) for block in entry.made)
            course.append(_Step(entry.func, made, entry.taken, added))
    kept: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if leaf is None:
            continue
        new = tracker.counted(leaf) if type(leaf) is FakeTensor and not leaf.requires_grad else None
        number = None if new is None else numbers.get(id(new))
        if number is None:
            return None
        kept.setdefault(number, position)
    if living != set(kept):
        return None
    made_here = made_of(leaves, tensors)
    if any(isinstance(each, Made) and each.number is not None and each.number < len(tensors) for each in made_here):
        return None
    return _Known(tuple(course), made_here, tree, kept)


def _again(known: _Known, tensors: list[Tensor], trackers: Sequence[Tracker]) -> Any:
    """Results like those, and for the trackers all that led to them."""
    with ExitStack() as stack:
        for tracker in trackers:
            stack.enter_context(tracker.looking_away())
        results = made_again(known.results, tensors)
    storages: dict[int, Any] = {number: results[position].untyped_storage() for number, position in known.kept.items()}
    there: dict[int, Any] = {}
    place = None if trackers[0].places is None else trackers[0].places.now()
    count = 0
    for step in known.course:
        if isinstance(step, int):
            del there[step]
            continue
        made = []
        for nbytes, inner in step.made:
            there[count] = storages[count] if count in storages else Stand()
            made.append(Birth(there[count], nbytes, inner))
            count += 1
        for tracker in trackers:
            tracker.repeat(step.func, made, step.taken, None if step.added is None else there[step.added], place)
        del made
    return tree_unflatten(results, known.tree)
