"""What an optimizer's step asks of memory, noted as it runs, and counted again for other programs of the same model.

PyTorch's optimizers do the same for parameters, gradients and a state of the same forms, whatever program made the
gradients. Optimizers of others may do anything, and run each time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.memory.noted import Did, count_again, in_numbers
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.foreach import has_step_hooks

_PLAIN = (int, float, bool, str, type(None))
_State = tuple[tuple[int, dict[str, Any]], ...]


@dataclass(frozen=True)
class Update:
    """Operators and the numbers of storages that ended; ``state`` is that of parameters, by number, that had none.

    A tensor in it is the number of its storage and what it is like.
    """

    entries: tuple[Did | int, ...]
    state: _State


def take_update(
    optimizer: torch.optim.Optimizer,
    updates: dict[object, Update | None],
    trackers: list[Tracker],
    run: Callable[[], None],
) -> None:
    """Let the optimizer take its step, which ``run`` does, or count what it did when the same was asked of it."""
    asked = _asked(optimizer, trackers[0])
    if asked is None:
        run()
    elif asked not in updates:
        updates[asked] = _noted(optimizer, trackers[0], run)
    elif (known := updates[asked]) is None:
        run()
    else:
        _again(known, optimizer, trackers)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settings(optimizer: torch.optim.Optimizer) -> list[Any] | None:
    """What tells its settings apart; None where some are none of numbers and text."""
    words: list[Any] = []
    for group in optimizer.param_groups:
        settings = {**group, "params": len(group["params"])}
        if not all(_say(each, words) for item in settings.items() for each in item):
            return None
    return words


def _asked(optimizer: torch.optim.Optimizer, tracker: Tracker) -> tuple[Any, ...] | None:
    """What decides what a step does; None where something else may."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or "step" in vars(optimizer) or has_step_hooks(optimizer):
        return None
    words: list[Any] = [kind, tracker.edition, tracker.device_type, tracker.places is None, torch.get_default_dtype()]
    if (settings := _settings(optimizer)) is None:
        return None
    words += settings
    storages: list[int] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors = [parameter, parameter.grad, *state.values()]
            words += (len(state), *state)
            for each in tensors:
                if isinstance(each, Tensor):
                    if not _is_whole(each):
                        return None
                    words.append(TensorLike.of(each))
                    storages.append(id(each.untyped_storage()))
                elif not _say(each, words):
                    return None
    return tuple(words) if len({*storages}) == len(storages) else None


def _say(value: Any, words: list[Any]) -> bool:
    """Add what tells a setting apart; False where it is none of numbers and text."""
    if isinstance(value, tuple):
        words += (tuple, len(value))
        return all(_say(each, words) for each in value)
    words += (type(value), value)
    return type(value) in _PLAIN


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is a fake one that fills a storage."""
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or tensor.storage_offset():
        return False
    return tensor.untyped_storage().nbytes() == TensorLike.of(tensor).extent * tensor.itemsize


def _noted(optimizer: torch.optim.Optimizer, tracker: Tracker, run: Callable[[], None]) -> Update | None:
    """Run it, and say what it did; None where it is to run each time."""
    log, settings = list[Any](), _settings(optimizer)
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    tracker.course = log
    try:
        run()
    finally:
        tracker.course = None
    happened = in_numbers(log)
    if happened is None or _settings(optimizer) != settings:
        return None
    new = _new_state(optimizer, before, happened.numbers, tracker)
    if new is None or [*new[1]] != sorted(happened.living):
        return None
    return Update(happened.entries, new[0])


def _new_state(
    optimizer: torch.optim.Optimizer, before: dict[Tensor, dict[str, Any]], numbers: dict[int, int], tracker: Tracker
) -> tuple[_State, list[int]] | None:
    """The state of parameters that had none, and the numbers of its storages; None where more than that is new."""
    places = {parameter: i for i, parameter in enumerate(_parameters(optimizer))}
    state: list[tuple[int, dict[str, Any]]] = []
    held: list[int] = []
    for parameter, now in optimizer.state.items():
        if (was := before.get(parameter)) is not None:
            if list(was) != list(now) or any(was[name] is not now[name] for name in now):
                return None
            continue
        found: dict[str, Any] = {}
        for name, value in now.items():
            if type(value) in _PLAIN:
                found[name] = value
                continue
            block = tracker.counted(value) if isinstance(value, Tensor) and _is_whole(value) else None
            number = None if block is None else numbers.get(id(block))
            if number is None:
                return None
            held.append(number)
            found[name] = number, TensorLike.of(value)
        if parameter not in places:
            return None
        state.append((places[parameter], found))
    return tuple(state), sorted(held)


def _again(update: Update, optimizer: torch.optim.Optimizer, trackers: list[Tracker]) -> None:
    """Count what the step did, and give the optimizer the state that it made."""
    parameters, storages = _parameters(optimizer), dict[int, Any]()
    with ExitStack() as stack:
        for tracker in trackers:
            stack.enter_context(tracker.looking_away())
        for i, values in update.state:
            made: dict[str, Any] = {}
            for name, value in values.items():
                made[name] = value[1].empty() if isinstance(value, tuple) else value
                if isinstance(value, tuple):
                    storages[value[0]] = made[name].untyped_storage()
            optimizer.state[parameters[i]] = made
    there: dict[int, Any] = {}
    count = 0
    for entry in update.entries:
        if isinstance(entry, int):
            del there[entry]
        else:
            count_again(entry, count, storages, there, trackers)
            count += len(entry.made)
