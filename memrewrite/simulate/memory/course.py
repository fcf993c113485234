"""What forward, loss and backward of a program ask of memory, noted as they run, to be counted again without running.

A program is simulated several times: by one pass while plans are compared, in two steps once it is chosen, with the
blocks of an allocator and without, in one piece, and in more steps with smaller batches between. All its passes over
the same inputs do the same, which takes a fifth of the time to count.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.memory.counted import Birth, Counted, Ran, Stand, by_cublas
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.transients import NOTHING, Taken
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.pytrees import tensors_in, tree_iter
from memrewrite.torch_internals.spread import parts_of
from memrewrite.workload.step import Inputs, Phase, Running, Step

OnPhase = Callable[[Phase], None]


@dataclass(frozen=True, slots=True)
class _Did:
    """An operator: the bytes of each storage it made, and what it took; ``added`` to a storage it was in place.

    ``place`` is as in ``Ran``.
    """

    func: Any
    made: tuple[int, ...]
    taken: Taken
    added: int | None
    place: str | None


@dataclass(frozen=True)
class Course:
    """Operators, the numbers of storages that ended, and the phases that ended, in order.

    ``gradients`` are the storages of these, by number, with the number of their leaf; ``output`` and ``loss`` are the
    storages that those leave.
    """

    entries: tuple[_Did | int | Phase, ...]
    gradients: tuple[tuple[int, int, TensorLike], ...]
    output: tuple[int, ...]
    loss: tuple[int, ...]


@dataclass(frozen=True)
class Noted:
    """What is known of a program's passes, by the table of what operators take and inputs; None of what runs each time.

    They are counted again where they are ``alike``, or by tables with which a second one did what the first had done:
    those are ``steady``. ``room`` is for how many bytes the program makes room first of all.
    """

    courses: dict[object, Course | None] = field(default_factory=dict)
    alike: bool = False
    room: int = 0
    steady: set[object] = field(default_factory=set)


def notable(step: Step, inputs: Inputs) -> bool:
    """Whether each pass of a loop does what the one before did, as far as the loop tells."""
    alone = type(step) is Step and step.mesh is None and not step.target.fuses and not step.in_backward
    found_alike = step.micro_batches == 1 and step.loop.zero_grad != "in place" and not step.left
    return alone and found_alike and step.mode == "train" and not any(t.requires_grad for t in inputs.tensors())


class Replay:
    """Counts once more what is in a course, one entry after the other.

    ``storages`` are those, by number, that stand for themselves; ``there`` is what lives.
    """

    def __init__(self, trackers: Sequence[Tracker], storages: dict[int, Any]) -> None:
        self._trackers, self._storages = trackers, storages
        self.there: dict[int, Any] = {}
        self._count = 0

    def count(self, entry: "_Did | int") -> None:
        """An operator runs, or a storage ends."""
        there = self.there
        if isinstance(entry, int):
            del there[entry]
            return
        new = range(self._count, self._count + len(entry.made))
        self._count += len(entry.made)
        there.update((number, self._storages.get(number) or Stand()) for number in new)
        births = [Birth(there[number], size, False) for number, size in zip(new, entry.made, strict=True)]
        added = None if entry.added is None else there[entry.added]
        for tracker in self._trackers:
            tracker.repeat(entry.func, births, entry.taken, added, entry.place)
        if entry.added is not None:
            del there[entry.added]


class Noting(Running):
    """A loop that notes a pass as it runs, and counts later ones by that."""

    def __init__(self, noted: Noted, trackers: Sequence[Tracker], *loop: Any) -> None:
        super().__init__(*loop)
        self._noted, self._trackers, self._usual = noted, trackers, self.inputs
        self._ran: dict[object, Course | None] = {}  # in this loop

    def _pass(self, first: bool, on_phase: OnPhase) -> Any:
        table, noted = self._trackers[0].table, self._noted
        asked = table, self.inputs is self._usual, tuple(tensor.shape for tensor in self.inputs.tensors())
        if asked not in noted.courses:
            loss, noted.courses[asked] = self._note(first, on_phase)
            self._ran[asked] = noted.courses[asked]
            return loss
        course, before = noted.courses[asked], self._ran.get(asked)
        if course is not None and (noted.alike or table in noted.steady):
            return self._again(course, on_phase)
        if before is None:
            return super()._pass(first, on_phase)
        loss, now = self._note(first, on_phase)
        noted.steady.update([table] if now == before else ())
        return loss

    def _note(self, first: bool, on_phase: OnPhase) -> tuple[Any, Course | None]:
        """Run a pass; gives its loss, and what it did."""
        tracker, log = self._trackers[0], list[Any]()

        def tell(phase: Phase) -> None:
            log.append(phase)
            on_phase(phase)

        leaves = list(self.module.parameters())
        fresh = all(leaf.grad is None for leaf in leaves)
        before = {id(tracker.counted(each)) for each in self._held()}
        tracker.course = log
        try:
            loss = super()._pass(first, tell)
        finally:
            tracker.course = None
        results = [part for tensor in tensors_in(self.output) for part in parts_of(tensor)], [loss]
        return loss, course_of(log, leaves, *results, tracker, before) if fresh else None

    def _held(self) -> list[Tensor | Stand]:
        """What the loop holds of the last step, or what stands for it."""
        parts = [part for tensor in tensors_in((self.output, self._loss)) for part in parts_of(tensor)]
        return [*parts, *(each for each in tree_iter((self.output, self._loss)) if isinstance(each, Stand))]

    def _again(self, course: Course, on_phase: OnPhase) -> Any:
        """Count what a pass does; returns what stands for its loss."""
        leaves = list(self.module.parameters())
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.enter_context(tracker.looking_away())
            gradients = {number: (leaves[leaf], like.empty()) for number, leaf, like in course.gradients}
        replay = Replay(self._trackers, {n: gradient.untyped_storage() for n, (_, gradient) in gradients.items()})
        for entry in course.entries:
            if not isinstance(entry, str):
                replay.count(entry)
                continue
            if entry == "forward":
                self.hold_output([replay.there[number] for number in course.output])
            elif entry == "loss":
                self.hold_loss([replay.there[number] for number in course.loss])
            elif entry == "backward":
                for leaf, gradient in gradients.values():
                    leaf.grad = gradient
            on_phase(entry)
            self._after(entry)
        return [replay.there[number] for number in course.loss]

    def _after(self, phase: Phase) -> None:
        if phase == "data" and self._noted.room:
            for tracker in self._trackers:
                if tracker.blocks is not None:
                    tracker.blocks.make_room(self._noted.room)
        if phase == "loss" and self.step.loop.zero_grad == "before backward":
            self._zero_grad()


def course_of(
    log: Sequence[Ran | Counted | Phase | None],
    leaves: Sequence[Tensor],
    output: Sequence[Tensor],
    loss: Sequence[Tensor],
    tracker: Tracker,
    before: Collection[int] = (),
) -> Course | None:
    """What happened; None where that is more than storages that come and go, gradients and results aside.

    Those ``before``, by ``id``, are let go of as a phase ends, by the loop and not by what is noted.
    """
    numbers: dict[int, int] = {}
    known: dict[Any, _Did] = {}
    entries: list[_Did | int | Phase] = []
    living: set[int] = set()
    let_go = False
    for entry in log:
        if isinstance(entry, str):
            entries.append(entry)
            let_go = False
        elif isinstance(entry, Counted):
            if (number := numbers.get(id(entry))) is None:  # it was there before
                let_go = id(entry) in before
                if not let_go:
                    return None
                continue
            living.remove(number)
            entries.append(number)
        elif entry is None or let_go or (entry.added is not None and id(entry.added) not in numbers):
            return None
        elif entry.made or _takes(entry.taken) or by_cublas(entry.func):  # else it does nothing to what is counted
            added = None if entry.added is None else numbers[id(entry.added)]
            living.discard(-1 if added is None else added)
            for block in entry.made:
                numbers[id(block)] = number = len(numbers)
                living.add(number)
            made = tuple([block.nbytes for block in entry.made])
            asked = id(entry.func), made, id(entry.taken), added, entry.place
            if (did := known.get(asked)) is None:
                did = known[asked] = _Did(entry.func, made, entry.taken, added, entry.place)
            entries.append(did)
    gradients = _gradients(leaves, numbers, tracker)
    of_output, of_loss = _numbers(output, numbers, tracker), _numbers(loss, numbers, tracker)
    if gradients is None or living != {*(number for number, *_ in gradients), *of_output, *of_loss}:
        return None
    return Course(tuple(entries), gradients, of_output, of_loss)


def _takes(taken: Taken) -> bool:
    return taken is not NOTHING and taken != NOTHING


def _numbers(tensors: Iterable[Tensor], numbers: dict[int, int], tracker: Tracker) -> tuple[int, ...]:
    """The numbers of their storages, as far as these are new."""
    found = (numbers.get(id(tracker.counted(tensor))) for tensor in tensors if tensor.layout is torch.strided)
    return tuple(dict.fromkeys(number for number in found if number is not None))


def _gradients(
    leaves: Sequence[Tensor], numbers: dict[int, int], tracker: Tracker
) -> tuple[tuple[int, int, TensorLike], ...] | None:
    """The numbers of the storages of gradients, of which each fills one; None where one does not."""
    found: dict[int, tuple[int, int, TensorLike]] = {}
    for leaf, tensor in enumerate(leaves):
        if (gradient := tensor.grad) is None:
            continue
        if type(gradient) is not FakeTensor or gradient.layout is not torch.strided:
            return None
        like, number = TensorLike.of(gradient), numbers.get(id(tracker.counted(gradient)))
        whole = gradient.untyped_storage().nbytes() == like.extent * like.dtype.itemsize
        if number is None or number in found or not whole or gradient.storage_offset():
            return None
        found[number] = number, leaf, like
    return tuple(found.values())
