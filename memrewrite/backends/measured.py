"""What steps take on a GPU, beside what was told: nobody who reads graphs sees a loss outside of them, nor what runs or
is held between graphs.

CUDA's caching allocator counts the most that tensors took: where that has risen from the beginning of one step to the
next, it is of what ran between them. The first step does not count where it is above what was told, as by a proof, or
by kernels that Inductor tries out: the count is reset after it. What lived there before and is no part of the model,
such as another one, does not count, as it does not for the budget.

A step that takes more than its budget is compiled again with room for that, where that can be (``Step.correct``).
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from memrewrite.backends.asked import Asked
from memrewrite.backends.calls import recorded
from memrewrite.backends.partition import Partition
from memrewrite.backends.steps import Step
from memrewrite.records.options import format_bytes
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.targets.allocator import rounded
from memrewrite.targets.transients import allocated

_TIMES = 6  # that are looked at, from the beginning of one step to the next


class _Looks:
    """Looks at the count as a step begins: at the first call of a graph after a gradient of the step before.

    ``number`` grows with what is no training of one model, such as compiling a graph or calling one of another model's,
    and ``last`` is whose was called last.
    """

    number: ClassVar[int] = 0
    last: ClassVar[int] = 0

    def __init__(self) -> None:
        self._left = _TIMES
        self._room: Asked | None = None  # that makes room for what is taken outside
        self._before = -1, 0  # the number and the peak as the step began
        self._first: Partition | None = None
        self._others: int | None = None  # the least that ever lived beside the model
        self._waits = self._ended = False  # for a gradient

    def compile(self) -> None:
        """A graph of the step is compiled."""
        _Looks.number += 1
        self._left, self._room = _TIMES, None

    def look(self, step: Step, partition: Partition, args: Sequence[Any], device: torch.device, name: str) -> None:
        """A graph is called."""
        if _Looks.last != id(step) or not torch.is_grad_enabled():
            _Looks.number += 1
            _Looks.last = id(step)
        same = self._before[0] == _Looks.number
        begins = self._ended or not (same and (self._waits or self._first is not partition))
        if not (self._left and begins and torch.is_grad_enabled()):
            return
        try:
            current, peak = allocated(device)
        except RuntimeError:  # of an allocator of one's own, which may count nothing
            self._left = 0
            return
        taken = peak - self._beside(current, partition, args)
        if same:
            self._left -= 1
            if self._left == _TIMES - 1 and taken > step.peak:  # what the first step runs is tried out
                torch.cuda.reset_peak_memory_stats(device)
                peak = current
            elif peak > self._before[1]:
                self._take(step, taken, name)
        self._before, self._first, self._waits, self._ended = (_Looks.number, peak), partition, False, False

    def wait(self, step: Step, results: Any) -> None:
        """What a graph gives is there, of which a gradient ends the step."""
        if self._waits or not (self._left or self._room) or not torch.is_grad_enabled():
            return
        if (asked := next(recorded(results), None)) is not None:
            asked.register_hook(functools.partial(self._end, step))
            self._waits = True

    def _end(self, step: Step, gradient: Tensor) -> None:
        self._ended, room, self._room = True, self._room, None
        if room is not None:
            step.correct(room)

    def _beside(self, current: int, partition: Partition, args: Sequence[Any]) -> int:
        """The bytes of ``current`` that are not of the model nor belong to it, at the least of what was seen so far.

        Before the first step there may be no state yet, nor an output.
        """
        lives = partition.lives
        gradients = sum(rounded(p.grad.nbytes) for p in args if isinstance(p, nn.Parameter) and p.grad is not None)
        there = lives.base - lives.others - lives.reduced + gradients
        if self._others is None:
            self._others = max(current - there + lives.state, 0)
        else:
            self._others = min(self._others, max(current - there - partition.given_out, 0))
        return self._others

    def _take(self, step: Step, peak: int, name: str) -> None:
        """The step that ends took so many bytes."""
        assert self._first is not None  # noqa: S101  (it began)
        assert step.asked.budget is not None  # noqa: S101  (there is no step without)
        self._first.measured = max(peak, self._first.measured or 0)
        told, budget = step.peak, step.asked.budget.bytes
        if budget is None or step.stays or not told <= budget < peak:
            return
        room = step.with_room(peak)
        option = f"loss={room.loss}" if room.loss != step.asked.loss else f"reserve={room.reserve}"
        self._left, self._room = 0, room if step.is_correctable else None
        again = f"It is compiled again to make room for that, as {option} does from the first step on."
        warnings.warn(
            f"A step of {name} took {format_bytes(peak)} of {format_bytes(budget)}, where {format_bytes(told)} were "
            "told: the rest is of what runs or is held outside of what was compiled, as a loss may be. "
            f"{again if self._room else f'Compile with {option}.'}",
            BeyondPlanWarning,
            stacklevel=2,
        )


def _counted(inputs: Sequence[Any]) -> torch.device | None:
    """The device whose allocator counts what tensors take."""
    return next((each.device for each in inputs if isinstance(each, Tensor) and each.device.type == "cuda"), None)


_LOOKS: "weakref.WeakKeyDictionary[Step, _Looks]" = weakref.WeakKeyDictionary()


def watched(
    made: Callable[..., Any], inputs: Sequence[Any], partition: Partition, step: Step | None, name: str
) -> Callable[..., Any]:
    """``made``, a graph of ``step``, of which is noted what steps take on a GPU; ``name`` is what was compiled."""
    device = _counted(inputs)
    if step is None:
        _Looks.number += 1
        return made
    looks = _LOOKS.setdefault(step, _Looks())
    looks.compile()
    if device is None:
        return made

    def run(*args: Any) -> Any:
        looks.look(step, partition, args, device, name)
        results = made(*args)
        looks.wait(step, results)
        return results

    return run
