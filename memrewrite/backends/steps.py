"""Training steps of several graphs: the first one takes as little as can be, and shows what the next ones may take.

Where a graph breaks, or where blocks are compiled one by one, a graph is divided before anything is known of those that
come later. So all are at first divided so that they leave most to others. When the first backward begins it is known
which graph is called how often, and after which others: then the cheapest plans are found with which the whole step
stays within its budget, and graphs for which these are others are compiled once more, when they are next called; unless
the step is within its budget as it is, and hardly slower. The next process asks for what was settled at once.

A graph that has all of a model's parameters is taken for the whole step. Where others follow all the same, such as that
of a loss, these get what room it left, and the first step may take more than its budget. So it may where it is called
several times, and comes from a cache, which knows no plans: it is divided anew then.

Where steps take more than was told of them (``memrewrite.backends.measured``), all begins again with room for that: it
is taken for a loss, which lives beside all that is kept for backward, and if that is not enough, for what always does.
"""

import hashlib
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.backends.asked import Asked
from memrewrite.backends.calls import Call, Part, recorded
from memrewrite.backends.choices import InStep
from memrewrite.backends.frontier import Found
from memrewrite.backends.known import KnownStep, made_by
from memrewrite.backends.partition import Partition
from memrewrite.backends.resident import Resident
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.compiling import code_of_frame, reference

_HALVINGS = 7  # of the bytes between the most room with which a step fits and the least with which it does not
_CORRECTIONS = 2  # at most
_WORTH = 0.01  # of a step's time: plans that fit, and would be spared less by others, are not compiled again for these


class Step:
    """The graphs of a step. ``told`` is what each is to know; ``calls`` are those of forward in their order.

    ``highest`` is the peak of the step in bytes so far, by what was compiled for all that it was given. ``asked`` has
    what was found to be taken besides, too; it ``stays`` as it was where there is no plan for that.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = self._asked = asked
        self.stays, self._corrections = False, 0
        self._parts: dict[str, Part] = {}
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of the step."""
        self.told, self.highest = InStep(), 0
        self._calls: list[Call] = []
        self._ended, self._careful, self._again = True, False, False
        self._names: dict[str, str] = {}  # that a step is known by, by the graph it begins with
        self._known: KnownStep | None = None

    @property
    def peak(self) -> int:
        """The most that is told of one of its graphs, in bytes."""
        parts = (part.partition for part in self._parts.values())
        return max((each.peak or each.alone or 0 for each in parts if not each.replaced), default=0)

    @property
    def is_correctable(self) -> bool:
        """Whether it may be compiled again for less: other processes that call its collectives know nothing of it."""
        talks = any(part.partition.communicates for part in self._parts.values())
        return not talks and self._corrections < _CORRECTIONS

    def with_room(self, peak: int) -> Asked:
        """What is to be asked for where a step takes ``peak`` bytes at its most."""
        kept = {call.key: part.kept for call in self._calls if (part := self._parts[call.key].partition).kept}
        loss = peak - self._beside(kept)[1] if kept else 0
        if self.asked.loss or loss <= 0:
            return replace(self.asked, reserve=self.asked.reserve + peak - self.peak)
        return replace(self.asked, loss=loss)

    def correct(self, asked: Asked) -> None:
        """All is to be compiled again as ``asked``."""
        self._corrections += 1
        self.asked = asked
        self._forget()

    def restore(self) -> bool:
        """All is to be compiled again as it was asked, and stays so; says whether it was corrected since."""
        if self.asked == self._asked:
            return False
        self.asked, self.stays = self._asked, True
        self._forget(but=code_of_frame())
        return True

    def _forget(self, but: types.CodeType | None = None) -> None:
        self._begin()
        for part in self._parts.values():
            part.more, part.before_loss = 0, None
            if part.code is not None and part.code is not but:
                part.made = part.there()
                part.forget()

    @property
    def calls(self) -> list[str]:
        """The keys of those of the step; what was evaluated before, and let go of, is no part of it."""
        return [call.key for call in self._living()]

    def _living(self) -> list[Call]:
        """From the first one on that backward may come to, with those without gradients right before it."""
        start = 0
        for number, call in enumerate(self._calls, start=1):
            if call.asks is None:
                continue
            if call.asks() is not None:
                break
            start = number
        return self._calls[start:]

    @property
    def _over(self) -> bool:
        """Whether what runs next is the first of a step."""
        return self._ended or not self._living()

    def tells(self, key: str, lives: Resident) -> dict[str, Any]:
        """What the partition of a graph is told of the step as it is compiled: its arguments by name."""
        if self.told.room is None and self._over and not self._again:
            self._known = KnownStep.find(self._names.setdefault(key, f"{made_by()} {self.asked} {lives} {key}"))
        part = None if self._known is None else self._known.parts.get(key)
        if part is not None:
            known = {"more": part.more, "before_loss": part.before_loss, "known": True}
            return {"in_step": part.in_step, "highest": self.highest, **known}
        there = self._parts.get(key)
        known = {} if there is None else {"more": there.more, "before_loss": there.before_loss}
        return {"in_step": self._in_step(lives), "highest": self.highest, **known}

    def _in_step(self, lives: Resident) -> InStep | None:
        """What is told of others to a graph that is compiled now; nothing where it seems to be the whole step."""
        if self.told.room is not None:
            return self.told
        over = self._over
        if over and not lives.later and not self._again:
            return None
        self._careful = self._careful or over
        return InStep(late=not self._careful)

    def add(self, key: str, partition: Partition, made: Callable[..., Any]) -> Callable[..., Any]:
        """``made`` of the graph ``key``, whose calls are noted until the step is settled."""
        before = [] if self._ended else [self._parts[call] for call in self.calls]
        kept = sum(part.partition.foreseen.kept for part in before if part.partition.foreseen is not None)
        code = code_of_frame()
        self._replace(code)
        if key in self._parts and self._parts[key].again:
            partition.set_before(self._parts[key].usual)
        self._parts[key] = Part(partition, made, reference(made), code, partition.lives.earlier, len(before), kept)
        self.highest = max(self.highest, partition.peak or 0)

        def run(*args: Any) -> Any:
            results = made(*args)
            if self.told.room is None and torch.is_grad_enabled():
                self._note(key, args, results)
            return results

        return run if self.told.room is None else made

    def _replace(self, code: types.CodeType | None) -> None:
        """What was forgotten of ``code`` is told of no more: it is compiled again, perhaps for sizes that vary."""
        for part in self._parts.values():
            if part.again and part.code is code:
                part.partition.replaced, part.made = True, None

    def _note(self, key: str, args: Sequence[Any], results: Any) -> None:
        self._calls, self._ended = [] if self._ended else self._living(), False
        asked, hook = next(recorded(results), None), self._backward  # which lives as long as what it is put on
        if asked is not None:
            asked.register_hook(hook)
        trained = (each for each in args if isinstance(each, nn.Parameter) and each.requires_grad)
        weights = {id(each): rounded(each.nbytes) for each in trained}
        self._calls.append(Call(key, None if asked is None else weakref.ref(hook), weights))

    def _backward(self, gradient: Tensor) -> None:
        """The first gradient of a step: it has no more calls of forward."""
        if not self._ended:
            self._calls, self._ended = self._living(), True
            self._settle()

    def _settle(self) -> None:
        known, self._known = self._known, None
        if known is not None and self._takes(known):
            return
        alone = self._parts[self.calls[0]] if len(self.calls) == 1 else None
        if alone is not None and alone.partition.in_step is None:  # as far as is known, and divided so
            alone.partition.options = alone.made = None
            return
        if self._asks_again():
            return
        parts = {key: part for key, part in self._parts.items() if part.partition.options is not None}
        before = self._foreseen({key: part.plan(InStep(sys.maxsize)) for key, part in parts.items()})
        told = self._told(parts, max(before.values(), default=0))
        chosen = {key: part.plan(told) for key, part in parts.items()}
        if self._stays(parts, chosen, told.limit):
            chosen = {key: part.now for key, part in parts.items()}
        self.told = replace(told, batch=self._batch)
        saved = {key: each.peaks.saved for key, each in chosen.items()}
        found, (kept, through) = self._peaks(chosen), self._beside(saved)
        above = told.limit is not None and max(self._foreseen(chosen).values(), default=0) > told.limit
        for key, part in parts.items():
            part.usual, part.more = before[key], max(kept[key]) - kept[key][0]
            part.before_loss = through - saved[key]
            part.settle(told, chosen[key], found[key], above)
        if not above:
            self._keep()

    def _keep(self) -> None:
        """Note the step for the next process."""
        calls = self.calls
        if (name := self._names.get(calls[0])) is not None:  # else it was compiled in the middle of another step
            parts = {key: self._parts[key].known(self.told) for key in calls}
            KnownStep(self.told, tuple(calls), parts).keep(name)

    def _takes(self, known: KnownStep) -> bool:
        """Whether it is settled as it was in a process before: it is where the calls are the same."""
        if tuple(calls := self.calls) != known.calls:
            if (name := self._names.get(calls[0])) is not None:
                KnownStep.drop(name)
            return False
        self.told = known.told
        for key, part in known.parts.items():
            self._parts[key].take(part)
        return True

    def _told(self, parts: Mapping[str, Part], usual: int) -> InStep:
        """The most room with which the step fits, of which PyTorch's own plans take ``usual`` bytes."""

        def peak(told: InStep) -> int:
            return max(self._foreseen({key: part.plan(told) for key, part in parts.items()}).values(), default=0)

        assert self.asked.budget is not None  # noqa: S101  (there is no step without)
        limit = self.asked.budget.resolve(usual)
        if limit is None:
            return min(InStep(0), InStep(0, peak(InStep(0))), InStep(sys.maxsize), key=peak)
        if usual <= limit and self.asked.budget.bytes is None:  # all that PyTorch's own plans take, as it is
            limit = sys.maxsize
        low, high = (sys.maxsize, 0) if usual <= limit else (0, max(part.most for part in parts.values()))
        for _ in range(_HALVINGS if low < high else 0):
            room = (low + high) // 2
            low, high = (room, high) if peak(InStep(room, limit)) <= limit else (low, room)
        return InStep(low, limit)

    def _stays(self, parts: Mapping[str, Part], chosen: Mapping[str, Found], limit: int | None) -> bool:
        """Whether the step is within its budget as it was compiled, and others that are chosen are hardly faster."""
        now = {key: part.now for key, part in parts.items()}
        if limit is None or max(self._foreseen(now).values(), default=0) > limit:
            return False
        spared = sum(now[key].ms - chosen[key].ms for key in parts)
        return spared <= _WORTH * sum(part.ms for part in parts.values())

    def _asks_again(self) -> bool:
        """Whether graphs have to be divided anew before anything is settled: this is the first of several calls where
        plans of some are not known, as they come from a cache or were alone in a step before."""
        unknown = [part for key in dict.fromkeys(self.calls) if (part := self._parts[key]).is_unknown]
        if self._again or not unknown:
            return False
        self._again = True
        for part in unknown:
            part.forget()
        return True

    @property
    def _batch(self) -> int:
        """The bytes that the first graph of a step is given."""
        return self._parts[self.calls[0]].partition.lives.inputs

    def _peaks(self, plans: Mapping[str, Found], by_code: bool = True) -> dict[str, int]:
        """The peaks of the step in bytes while each graph runs with these plans, by what the first step showed, or by
        what was foreseen alone."""
        others, before_loss = self._beside({key: found.peaks.saved for key, found in plans.items()})
        least = before_loss + self.asked.loss if self.asked.loss else 0
        return {
            key: max(self._parts[key].partition.peak_of(plans[key], max(each), self._batch, by_code), least)
            for key, each in others.items()
        }

    def _foreseen(self, plans: Mapping[str, Found]) -> dict[str, int]:
        """The peaks that the budget is for: one in percent is one of what is foreseen."""
        assert self.asked.budget is not None  # noqa: S101  (there is no step without)
        return self._peaks(plans, self.asked.lowest or self.asked.budget.bytes is not None)

    def _beside(self, saved: Mapping[str, int]) -> tuple[dict[str, list[int]], int]:
        """What lives as each graph that has so much ``saved`` is first called, and then while its forward and backward
        runs, by call, besides what did as it was compiled; none, where nobody asks for its gradients. And all that
        lives once forward is through."""
        first = self._parts[self._calls[0].key]
        unknown = [(part.before - first.before - part.kept, part.at) for part in self._parts.values() if part.at]
        # Of what no plan told, such as what one graph makes and the next one keeps: where most was for each call.
        most, calls = max(unknown, key=lambda each: each[0] / each[1], default=(0, 1))
        kept, others, by_key = first.before, 0, dict[str, list[int]]()
        seen = Counter[str]()
        for number, call in enumerate(self._calls):
            key, others = call.key, max(-(-most * number // calls), 0)
            part = self._parts[key]
            lives = part.partition.lives
            if key not in saved:  # it is as it was
                kept += 0 if part.partition.foreseen is None else part.partition.foreseen.kept
            else:
                gone = min(seen[key] * lives.own, lives.others)  # gradients that earlier backwards have yet to make
                now = kept + others - lives.earlier - gone
                made = call.shared(self._calls[number + 1 :])  # gradients, by the backward of later calls
                by_key.setdefault(key, [now]).append(now + made)
                kept += saved[key]
            seen[key] += 1
        lives = first.partition.lives
        besides = first.partition.base - first.partition.more - lives.earlier - lives.others
        return {key: [0] for key in saved} | by_key, besides + kept + others


_STEPS: "weakref.WeakKeyDictionary[nn.Module, dict[Asked, Step]]" = weakref.WeakKeyDictionary()


def step_of(model: nn.Module | None, asked: Asked) -> Step | None:
    """The step of a model that is at work; None without a budget, and where no module is."""
    if model is None or asked.budget is None:
        return None
    return _STEPS.setdefault(model, {}).setdefault(asked, Step(asked))


def key_of(graph: fx.GraphModule) -> str:
    """What is the same for a graph that Dynamo gives again."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    looks = [[getattr(each, name, "") for name in ("shape", "dtype", "requires_grad")] for each in values]
    return hashlib.sha256(f"{graph.code} {looks}".encode()).hexdigest()


def forget() -> None:
    """Dynamo was reset: what was compiled is no longer used."""
    _STEPS.clear()
