"""Where memory stands during the steps that were taken, and what follows from that."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memrewrite.simulate.memory.counted import Life
from memrewrite.simulate.memory.recorder import RESTS, WORKSPACES
from memrewrite.simulate.memory.tracker import OPERATOR_WORKSPACE
from memrewrite.workload.step import Phase


@dataclass(frozen=True)
class Timeline:
    """Where memory stands during the steps taken, two as a rule; everything in bytes.

    A storage counts as its bytes rounded up to 512; on CUDA as the block of the caching allocator that it lies in,
    unless that was not asked for. ``peak`` is that of the last step or of those after it, which get larger blocks for
    some of what they ask for; ``reserved`` is what the allocator holds by then, ``phases`` are the bytes in use as each
    phase of every step ends, ``categories`` those in use at ``peak`` by kind (they sum to it). ``events`` are (bytes in
    use, ``step 2 backward: operator``) after each operator that changed them, ``peak_event`` the number of the one at
    which the last step's peak was reached. ``floor`` is what no plan can lower: parameters, buffers, inputs with the
    targets that the loss function holds, gradients, optimizer state, an average of the weights, DDP's buckets and
    library workspaces. ``held`` is what is freed when the loop lets go of the last step's output and loss.
    ``multiplied`` says whether there was anything for cuBLAS to do.

    Where submodules were followed, ``lives`` has every storage and ``modules`` for each event the path of the submodule
    whose operator it is: in backward, the one whose forward is undone; "" for the module itself, None outside of it.
    ``asked_for`` are the same steps by what is asked for and not by blocks, where both were counted. ``real``
    says that the steps were, as tensors without data could not take them.
    """

    peak: int
    peak_step1: int
    phases: tuple[tuple[str, int], ...]
    categories: dict[str, int]
    events: list[tuple[int, str]]
    floor: int
    reserved: int
    multiplied: bool
    held: int = 0
    peak_event: int = 0
    lives: tuple[Life, ...] = ()
    modules: tuple[str | None, ...] = ()
    asked_for: "Timeline | None" = None
    real: bool = False

    def living(self, event: int) -> list[Life]:
        """The storages in use at the event of that number."""
        return [life for life in self.lives if life.born <= event < life.died]

    def split(self) -> dict[str, NDArray[np.int64]]:
        """Bytes in use at each event by category, from ``lives``; they sum to those in ``events``."""
        changes: dict[str, list[tuple[int, int]]] = {}
        for life in self.lives:
            changes.setdefault(life.category, []).extend(((life.born, life.bytes), (life.died, -life.bytes)))
        series = {category: _added_up(changed, len(self.events)) for category, changed in changes.items()}
        library = self.categories.get(WORKSPACES, 0)
        known = sum(series.values(), np.full(len(self.events), library, dtype=np.int64))
        operator = np.array([size for size, _ in self.events], dtype=np.int64) - known
        if library:
            series[WORKSPACES] = np.full(len(self.events), library, dtype=np.int64)
        return series | ({OPERATOR_WORKSPACE: operator} if operator.any() else {})

    def as_ends(self, phase: Phase, number: int) -> int:
        """Bytes in use as ``phase`` of step ``number``, the first or last, ends."""
        return [size for name, size in self.phases if name == phase][0 if number == 1 else -1]

    def peak_in(self, phase: Phase, number: int) -> int:
        """The peak in bytes of a phase of step ``number``, 0 where nothing happens in it."""
        return max((size for size, label in self.events if label.startswith(f"step {number} {phase}")), default=0)

    def repeated(self, usual: "Timeline", mode: Literal["train", "inference"]) -> int:
        """The peak in bytes that this one, of one forward and backward pass, would have in a second step.

        There is as much more in use in each phase of a second step than in that of the first as in ``usual``: optimizer
        state, and what the loop keeps from the last step.
        """
        made_before = usual.as_ends("data", 1) - self.as_ends("data", 1)  # by optimizers that make it as they are made

        def later(phase: Phase, like: Phase) -> int:
            """The peak of a phase that has as much more in use as there is as ``like`` ends."""
            return self.peak_in(phase, 1) + made_before + usual.as_ends(like, 2) - usual.as_ends(like, 1)

        ways: tuple[tuple[Phase, Phase], ...]
        ways = (("data", "data"), ("forward", "data"), ("loss", "forward"), ("backward", "backward"))
        return max(later(*way) for way in (ways if mode == "train" else ways[:2]))

    @property
    def passes_alike(self) -> bool:
        """Whether what the second step did until the optimizer works is what the first did, operator by operator."""
        first, second = (
            [*map(self._changes, (f"step {n} forward:", f"step {n} loss:", f"step {n} backward:"))] for n in (1, 2)
        )
        return first == second

    def _changes(self, phase: str) -> list[tuple[int, str]]:
        """Events of a phase, with the bytes in use beyond those at the first one."""
        events = [(size, label.removeprefix(phase)) for size, label in self.events if label.startswith(phase)]
        return [(size - events[0][0], operator) for size, operator in events]

    @property
    def peak_of_passes(self) -> int:
        """The peak in bytes of the second step until the optimizer works."""
        optimizer, second = "step 2 step", "step 2"
        return max(size for size, label in self.events if label.startswith(second) and not label.startswith(optimizer))

    @property
    def peak_of_optimizer(self) -> int:
        """The peak in bytes of the second step's last phase, in which the optimizer works; 0 in inference."""
        return max((size for size, label in self.events if label.startswith("step 2 step")), default=0)


def _added_up(changes: list[tuple[int, int]], count: int) -> NDArray[np.int64]:
    """The sum after each of ``count`` moments of what changed at some of them, in whole numbers."""
    moments, amounts = np.array(changes, dtype=np.int64).T
    totals = np.zeros(count + 1, dtype=np.int64)
    np.add.at(totals, moments, amounts)
    return totals.cumsum()[:-1]


def with_rests(timeline: Timeline, size: int) -> Timeline:
    """The timeline of steps whose later ones take ``size`` bytes more, as blocks are larger than what they are for."""
    if not size:
        return timeline
    return replace(timeline, peak=timeline.peak + size, categories={**timeline.categories, RESTS: size})


def with_workspaces(timeline: Timeline, size: int) -> Timeline:
    """The timeline with ``size`` bytes of library workspaces throughout, if the libraries had anything to do.

    What is reserved has them already, see ``run_tracked``.
    """
    if not size or not timeline.multiplied:
        return timeline
    return replace(
        timeline,
        peak=timeline.peak + size,
        peak_step1=timeline.peak_step1 + size,
        phases=tuple((phase, count + size) for phase, count in timeline.phases),
        categories={**timeline.categories, WORKSPACES: size},
        events=[(count + size, label) for count, label in timeline.events],
        floor=timeline.floor + size,
        asked_for=timeline.asked_for and with_workspaces(timeline.asked_for, size),
    )
