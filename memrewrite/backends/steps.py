"""Training steps of several graphs: the first one takes as little as can be, and shows what the next ones may take.

Where a graph breaks, or where blocks are compiled one by one, a graph is divided before anything is known of those that
come later. So all are at first divided so that they leave most to others. When the first backward begins it is known
which graph is called how often, and after which others: then the cheapest plans are found with which the whole step
stays within its budget, and graphs for which these are others are compiled once more, when they are next called.

A graph that has all of a model's parameters is taken for the whole step. Where others follow all the same, such as that
of a loss, these get what room it left, and the first step may take more than its budget.
"""

import hashlib
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.backends.asked import Asked
from memrewrite.backends.choices import InStep, Options
from memrewrite.backends.frontier import Found
from memrewrite.backends.partition import Partition
from memrewrite.backends.resident import Resident
from memrewrite.torch_internals.compiling import code_of_frame, forget_code
from memrewrite.torch_internals.pytrees import tree_leaves

_HALVINGS = 7  # of the bytes between the most room with which a step fits and the least with which it does not


@dataclass
class Part:
    """A graph of a step: what divided it, and the code that Dynamo has it from.

    ``before`` are the bytes that were kept as it was compiled, ``at`` how many calls of the step had been, ``kept``
    what these were known to keep. ``again``: it is to be compiled once more; until then what was ``made`` is told of.
    """

    partition: Partition
    made: Callable[..., Any] | None
    code: types.CodeType | None
    before: int
    at: int
    kept: int
    again: bool = False

    @property
    def options(self) -> Options:
        """The plans that it had; to be asked for until it is settled."""
        assert self.partition.options is not None  # noqa: S101  (see there)
        return self.partition.options

    def plan(self, told: InStep) -> Found:
        """What its partition makes of what is told."""
        return self.options.told(told, self.partition.base)

    @property
    def most(self) -> int:
        """The room with which nothing is to be gained by more."""
        return self.options.frontier.takes(self.options.usual)

    def settle(self, told: InStep, peak: int, above: bool) -> None:
        """Have it compiled again where what is told now gives another plan; else its step takes ``peak`` bytes.

        That is a guess: where it is ``above`` the budget, what is kept by then tells.
        """
        found, options = self.plan(told), self.options
        assert options.chosen is not None  # noqa: S101  (it was compiled)
        self.again = (above or found.order.saved != options.chosen.order.saved) and self.code is not None
        if self.again and self.code is not None:
            forget_code(self.code)
        else:
            self.partition.keep("lowest" if not told.room else "usual" if found is options.usual else "cheapest", peak)
            self.made = None
        self.partition.options = None  # holds graphs


class Step:
    """The graphs of a step. ``told`` is what each is to know; ``calls`` are those of forward in their order."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.told = asked, InStep()
        self.calls: list[str] = []
        self._parts: dict[str, Part] = {}
        self._ended, self._careful = True, False

    def tells(self, lives: Resident) -> InStep | None:
        """What a graph is to know that is compiled now; None where it seems to be the whole step."""
        if self.told.room is not None:
            return self.told
        if self._ended and not lives.later:
            return None
        self._careful = self._careful or self._ended
        return InStep(late=not self._careful)

    def add(self, key: str, partition: Partition, made: Callable[..., Any]) -> Callable[..., Any]:
        """``made`` of the graph ``key``, whose calls are noted until the step is settled."""
        before = [] if self._ended else [self._parts[call] for call in self.calls]
        kept = sum(part.partition.foreseen.kept for part in before if part.partition.foreseen is not None)
        if key in self._parts and self._parts[key].again:
            self._parts[key].partition.replaced = True
        self._parts[key] = Part(partition, made, code_of_frame(), partition.lives.earlier, len(before), kept)

        def run(*args: Any) -> Any:
            results = made(*args)
            if self.told.room is None and torch.is_grad_enabled():
                self._note(key, results)
            return results

        return run if self.told.room is None else made

    def _note(self, key: str, results: Any) -> None:
        if self._ended:
            self.calls, self._ended = [], False
        self.calls.append(key)
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.register_hook(self._backward)
                return

    def _backward(self, gradient: Tensor) -> None:
        """The first gradient of a step: it has no more calls of forward."""
        if not self._ended:
            self._ended = True
            self._settle()

    def _settle(self) -> None:
        alone = self._parts[self.calls[0]] if len(self.calls) == 1 else None
        if alone is not None and alone.partition.in_step is None:  # as far as is known, and divided so
            alone.partition.options = alone.made = None
            return
        assert self.asked.budget is not None  # noqa: S101  (there is no step without)
        parts = {key: part for key, part in self._parts.items() if part.partition.options is not None}

        def peaks(told: InStep) -> dict[str, int]:
            return self._peaks({key: part.plan(told) for key, part in parts.items()})

        def peak(told: InStep) -> int:
            return max(peaks(told).values(), default=0)

        limit = self.asked.budget.resolve(usual := peak(InStep(sys.maxsize)))
        if limit is None:
            told = min(InStep(0), InStep(0, peak(InStep(0))), InStep(sys.maxsize), key=peak)
        else:
            if usual <= limit and self.asked.budget.bytes is None:  # all that PyTorch's own plans take, as it is
                limit = sys.maxsize
            low, high = (sys.maxsize, 0) if usual <= limit else (0, max(part.most for part in parts.values()))
            for _ in range(_HALVINGS if low < high else 0):
                room = (low + high) // 2
                low, high = (room, high) if peak(InStep(room, limit)) <= limit else (low, room)
            told = InStep(low, limit)
        self.told, found = replace(told, batch=self._batch), peaks(told)
        above = limit is not None and max(found.values(), default=0) > limit
        for key, part in parts.items():
            part.settle(told, found.get(key, 0), above)

    @property
    def _batch(self) -> int:
        """The bytes that the first graph of a step is given."""
        return self._parts[self.calls[0]].partition.lives.inputs

    def _peaks(self, plans: Mapping[str, Found]) -> dict[str, int]:
        """The peaks of the step in bytes while each graph runs with these plans, by what the first step showed."""
        first = self._parts[self.calls[0]]
        unknown = [(part.before - first.before - part.kept, part.at) for part in self._parts.values() if part.at]
        # Of what no plan told, such as what one graph makes and the next one keeps: where most was for each call.
        most, calls = max(unknown, key=lambda each: each[0] / each[1], default=(0, 1))
        kept, peaks = first.before, dict[str, int]()
        seen = Counter[str]()
        for number, key in enumerate(self.calls):
            part, others = self._parts[key], max(-(-most * number // calls), 0)
            found, lives = plans.get(key), part.partition.lives
            if found is None:  # it is as it was
                kept += 0 if part.partition.foreseen is None else part.partition.foreseen.kept
            else:
                gone = min(seen[key] * lives.own, lives.others)  # gradients that earlier backwards have yet to make
                peak = part.partition.peak_of(found, kept + others - lives.earlier - gone, self._batch)
                peaks[key] = max(peaks.get(key, 0), peak)
                kept += found.peaks.saved
            seen[key] += 1
        return peaks


_STEPS: "weakref.WeakKeyDictionary[nn.Module, dict[Asked, Step]]" = weakref.WeakKeyDictionary()


def step_of(model: nn.Module | None, asked: Asked) -> Step | None:
    """The step of a model that is at work; None without a budget, and where no module is."""
    if model is None or asked.budget is None:
        return None
    return _STEPS.setdefault(model, {}).setdefault(asked, Step(asked))


def key_of(graph: fx.GraphModule) -> str:
    """What is the same for a graph that Dynamo gives again."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    looks = [(getattr(each, "shape", ""), getattr(each, "requires_grad", "")) for each in values]
    return hashlib.sha256(f"{graph.code} {looks}".encode()).hexdigest()


def forget() -> None:
    """Dynamo was reset: what was compiled is no longer used."""
    _STEPS.clear()
