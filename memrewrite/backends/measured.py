"""What steps take on a GPU, beside what was told: nobody who reads graphs sees a loss outside of them, nor what runs or
is held between graphs.

CUDA's caching allocator counts the most that tensors took: where that has risen from one call to the next, it is of
what ran between them. It is reset once, as the second step begins, if it is above what was told, as by a proof, or by
kernels that Inductor tries out, in the first step. What lived there before and is no part of the model, such as another
one, does not count, as it does not for the budget.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from memrewrite.backends.partition import Partition
from memrewrite.records.options import format_bytes
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.targets.allocator import rounded
from memrewrite.targets.transients import allocated

_TIMES = 6  # that are looked at of each graph, from one call of it to the next, the first of which does not count


class _Looks:
    """Looks at the count as a graph of ``owner``, a step, is called.

    ``number`` grows with what is no training of one model, such as compiling a graph or calling one of another model's,
    and ``last`` is whose was called last.
    """

    number: ClassVar[int] = 0
    last: ClassVar[int] = 0

    def __init__(
        self, device: torch.device, partition: Partition, owner: object, budget: int | None, name: str
    ) -> None:
        self._device, self._partition, self._owner = device, partition, id(owner)
        self._budget, self._name = budget, name
        self._left = _TIMES
        self._before: tuple[int, int] | None = None  # the number and the peak at the call before

    def look(self, args: Sequence[Any]) -> None:
        """The graph is called."""
        if _Looks.last != self._owner or not torch.is_grad_enabled():
            _Looks.number += 1
            _Looks.last = self._owner
        if not torch.is_grad_enabled() or not self._left:
            return
        try:
            current, peak = allocated(self._device)
        except RuntimeError:  # of an allocator of one's own, which may count nothing
            self._left = 0
            return
        others = max(current - self._living(args), 0)
        if self._before is not None and self._before[0] == _Looks.number:
            self._left -= 1
            if self._left == _TIMES - 1:  # what the first call runs is tried out
                peak = self._begin(current, peak, peak - others)
            elif peak > self._before[1]:
                self._take(peak - others)
        self._before = _Looks.number, peak

    def _begin(self, current: int, peak: int, taken: int) -> int:
        """The peak so far that others are compared with, of which the step before has ``taken`` so many bytes."""
        if taken <= (self._partition.peak or 0):
            return peak
        torch.cuda.reset_peak_memory_stats(self._device)
        return current

    def _living(self, args: Sequence[Any]) -> int:
        """The bytes of the model and what belongs to it when a graph is called again, and its optimizer has state."""
        lives = self._partition.lives
        gradients = [each.grad for each in args if isinstance(each, nn.Parameter) and each.grad is not None]
        there = lives.base - lives.others + self._partition.given_out
        return there + sum(rounded(each.nbytes) for each in gradients)

    def _take(self, peak: int) -> None:
        """So many bytes were taken since the call before."""
        partition = self._partition
        partition.measured = max(peak, partition.measured or 0)
        told = partition.peak
        if self._budget is None or told is None or not told <= self._budget < peak:
            return
        self._left = 0
        warnings.warn(
            f"A step of {self._name} took {format_bytes(peak)} of {format_bytes(self._budget)}, where "
            f"{format_bytes(told)} were told: the rest is of what runs or is held outside of what was compiled, as a "
            f"loss may be. Compile with reserve={peak - told + partition.asked.reserve}.",
            BeyondPlanWarning,
            stacklevel=2,
        )


def watched(
    made: Callable[..., Any], inputs: Sequence[Any], partition: Partition, owner: object, name: str
) -> Callable[..., Any]:
    """``made``, which notes what steps of ``owner`` take on a GPU, and warns once where that is above the budget;
    ``name`` is what was compiled."""
    _Looks.number += 1
    device = next((each.device for each in inputs if isinstance(each, Tensor) and each.device.type == "cuda"), None)
    budget = partition.asked.budget
    if device is None or budget is None or owner is None:
        return made
    looks = _Looks(device, partition, owner, budget.bytes, name)

    def run(*args: Any) -> Any:
        looks.look(args)
        return made(*args)

    return run
