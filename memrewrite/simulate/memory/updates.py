"""What an optimizer's step asks of memory, noted as it runs, to be counted again without running.

A plan is looked for by dozens of simulations, and the optimizer works at the end of each of their steps: a sixth of the
time that planning takes for a model of many small layers. What it does depends on its settings, its parameters and
their gradients, and on whether it has state yet, which it makes in its first step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.memory.course import Course, Replay, course_of
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS, FakeTensor, FakeTensorMode, fake_number
from memrewrite.torch_internals.foreach import has_hooks
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.workload.in_groups import InGroups
from memrewrite.workload.optimizers import parameters_in
from memrewrite.workload.step import Step

_STEADY = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""What these do for the memory is the same in all steps but the first, as their sources say (PyTorch 2.11 to 2.15)."""
_PLAIN = {int, float, bool, str, type(None)}


@dataclass(frozen=True)
class _Part:
    """A tensor of an optimizer's state: the number of its storage, None where that is not counted, and its value.

    The value is that of a number on the CPU, which later steps may ask for.
    """

    like: TensorLike
    number: int | None
    value: float | None

    @classmethod
    def of(cls, tensor: Tensor, number: int | None) -> "_Part":
        """That of ``tensor``."""
        value = None
        if tensor.device.type == "cpu" and tensor.dim() == 0:
            with suppress(*FAKE_TENSOR_ERRORS):  # it is not known, so that nobody asks for it
                value = tensor.item()
        return cls(TensorLike.of(tensor), number, value)

    def tensor(self, mode: FakeTensorMode) -> Tensor:
        """Such a tensor of a fake mode."""
        return self.like.empty() if self.value is None else fake_number(self.value, self.like.dtype, mode)


@dataclass(frozen=True)
class _Known:
    """What a step does, and the state that it makes, by parameter, counted over all groups, and name."""

    course: Course
    state: dict[int, dict[str, Any]]


_KNOWN: dict[Any, _Known | None] = {}  # by what tells a step apart; None where it is to run each time


@process_wide
@contextmanager
def updates_repeated(trackers: Sequence[Tracker]) -> Iterator[None]:
    """Meanwhile a step of an optimizer on fake tensors runs once, and the trackers are told what it did then."""
    own = Step.update

    def update(step: Step, optimizer: torch.optim.Optimizer) -> None:
        asked = _told(optimizer, trackers[0])
        if asked is not None and asked not in _KNOWN:
            _KNOWN[asked] = _noted(lambda: own(step, optimizer), optimizer, trackers[0])
        elif asked is None or (known := _KNOWN[asked]) is None:
            own(step, optimizer)
        else:
            _again(known, optimizer, trackers)

    with mock.patch.object(Step, "update", update):
        yield


def _told(optimizer: torch.optim.Optimizer, tracker: Tracker) -> tuple[Any, ...] | None:
    """What tells what an optimizer does next for the memory; None where it is to run."""
    kind = optimizer._of if isinstance(optimizer, InGroups) else type(optimizer)
    if kind not in _STEADY or has_hooks(optimizer) or "step" in vars(optimizer) or tracker.on_host:
        return None
    words: list[Any] = [type(optimizer), type(tracker.target), tracker.table, tracker.device_type]
    words += (torch.get_default_dtype(), bool(optimizer.state))
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name == "params":
                continue
            if any(type(each) not in _PLAIN for each in (value if isinstance(value, tuple) else (value,))):
                return None
            words += (name, value)
        for parameter in group["params"]:
            for tensor in (parameter, parameter.grad):
                if tensor is not None and (type(tensor) is not FakeTensor or tensor.layout is not torch.strided):
                    return None
                words.append(tensor if tensor is None else TensorLike.of(tensor))
    return tuple(words)


def _noted(run: Callable[[], None], optimizer: torch.optim.Optimizer, tracker: Tracker) -> _Known | None:
    """What happens as it runs; None where other storages come to stay than those of the state that it makes."""
    first, log = not optimizer.state, list[Any]()
    tracker.course = log
    try:
        run()
    finally:
        tracker.course = None
    made = tensors_in(list(optimizer.state.values())) if first else []
    counted = [tensor for tensor in made if tracker.counts(tensor)]
    course = course_of(log, [], counted, [], tracker)
    if course is None or len(course.output) != len(counted):
        return None
    numbers = {id(tensor): number for tensor, number in zip(counted, course.output, strict=True)}
    with tracker.looking_away():
        state = _state(optimizer, numbers) if first else {}
    return None if state is None else _Known(course, state)


def _state(optimizer: torch.optim.Optimizer, numbers: dict[int, int]) -> dict[int, dict[str, Any]] | None:
    """What an optimizer has; None where some of it is no tensor that fills a storage of its own, and no plain value."""
    state: dict[int, dict[str, Any]] = {}
    for place, parameter in enumerate(parameters_in(optimizer.param_groups)):
        for name, value in optimizer.state.get(parameter, {}).items():
            kept = state.setdefault(place, {})
            if isinstance(value, Tensor):
                kept[name] = _Part.of(value, numbers.get(id(value)))
                if value.untyped_storage().nbytes() != kept[name].like.extent * value.itemsize:
                    return None
            elif type(value) in _PLAIN:
                kept[name] = value
            else:
                return None
    return state


def _again(known: _Known, optimizer: torch.optim.Optimizer, trackers: Sequence[Tracker]) -> None:
    """Count what a step does, after which this optimizer has the state that it makes."""
    storages, parameters = dict[int, Any](), parameters_in(optimizer.param_groups)
    with ExitStack() as stack:
        for tracker in trackers:
            stack.enter_context(tracker.looking_away())
        for place, parts in known.state.items():
            parameter: Any = parameters[place]  # a fake
            state = optimizer.state[parameter]
            for name, part in parts.items():
                state[name] = part.tensor(parameter.fake_mode) if isinstance(part, _Part) else part
                if isinstance(part, _Part) and part.number is not None:
                    storages[part.number] = state[name].untyped_storage()
    replay = Replay(trackers, storages)
    for entry in known.course.entries:
        if not isinstance(entry, str):
            replay.count(entry)
