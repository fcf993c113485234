"""What is asked of the search for a candidate within a budget, and what comes of it."""

from dataclasses import dataclass, replace
from math import inf

from memrewrite.plan.refine import FAR
from memrewrite.records.options import Budget
from memrewrite.records.outcomes import Measured
from memrewrite.search.bench import Bench
from memrewrite.search.candidate import Candidate
from memrewrite.search.inplace import marked_inplace, with_marks
from memrewrite.search.planning import Planned, plan, with_casts_dropped, without_needless_casts, without_plan

# What a plan leaves of a budget on CUDA: which blocks the caching allocator hands out, up to 1 MiB more than was asked
# for, depends on what ran before. In other processes peaks were 0.04 % higher.
RESERVE = 0.002
# What a plan leaves of a budget of reserved bytes there: in other processes one segment of small tensors more was seen.
_STRAY = 2 * 2 * 2**20


@dataclass(frozen=True)
class Fit:
    """A candidate within its budget; what was measured of it, where there is a device.

    ``planned`` is what it was before anything was written in place, with a plan for ``target`` bytes: others can be
    made of it.
    """

    candidate: Candidate
    measured: Measured | None
    planned: Candidate
    target: int


@dataclass(frozen=True)
class Unmet:
    """The candidate of the lowest peak that was found, in place as far as that helps, and the lowest bytes reached.

    Where that was ``given_up``, there may be a lower one.
    """

    candidate: Candidate
    lowest: int
    given_up: bool = False


@dataclass(frozen=True)
class Asked:
    """What is asked of a bench: ``limit`` means ``budget`` bytes, where the model as it is takes ``original`` of them.

    ``names`` are the passes that are allowed. Where the first plan for the lowest peak takes more than ``hopeless``
    bytes, no other is looked for. With ``measures`` False candidates are judged by simulation, also where there is a
    device.
    """

    bench: Bench
    limit: Budget
    budget: int
    original: int
    names: tuple[str, ...] | None
    hopeless: float = inf
    measures: bool = True

    @property
    def reserve(self) -> int:
        """What a plan that is measured leaves of a budget of allocated bytes."""
        return int(RESERVE * self.budget) if self.bench.on_cuda and not self.limit.reserved else 0

    @property
    def stray(self) -> int:
        """What a plan that is simulated leaves of a budget of reserved bytes, where there is a device."""
        return _STRAY if self.limit.reserved and self.bench.on_cuda else 0

    @property
    def binds(self) -> bool:
        """Whether the budget can be missed: without a device to measure on, the model as it is may be within it."""
        return self.bench.on_cuda or self.original > self.budget

    @property
    def may_checkpoint(self) -> bool:
        """Whether segments are of use and allowed."""
        return self.bench.step.mode == "train" and (self.names is None or "checkpoint_segments" in self.names)

    def plan(self, candidate: Candidate, target: int, in_turn: bool) -> Planned:
        """Plan for ``target`` bytes, if that is allowed."""
        if not self.may_checkpoint:
            return without_plan(candidate, target)
        planned = plan(candidate, target, in_turn=in_turn, hopeless=self.hopeless)
        if planned.given_up and self._may_do_in_place(planned.candidate):
            return plan(candidate, target, in_turn=in_turn)
        return planned

    def exceeded_by(self, candidate: Candidate) -> bool:
        """Whether a candidate as it is takes more than the budget; by one pass where that is clear."""
        if self.limit.minimum:
            return True
        usual = None if self.limit.reserved else candidate.bench.usual
        if usual is not None and candidate.is_clearly_above(self.budget, usual):
            return True
        return self.limit.of(candidate.simulate()) > self.budget

    def _may_do_in_place(self, candidate: Candidate) -> bool:
        """Whether a candidate that is far off may not be with activations in place; one that was planned is tried."""
        ready = marked_inplace(candidate, self.names)
        planned = any(region.marks for region in candidate.regions)
        return ready.programs != candidate.programs and not (planned and ready.peak() > self.hopeless)

    def unless_far(self, size: int) -> "Asked":
        """The same, given up where the peak is far above ``size`` bytes by the first way to plan."""
        return replace(self, hopeless=FAR * size)

    def finished(self, candidate: Candidate) -> Candidate:
        """A candidate that was planned, as it is returned; step by step where all at once takes more."""
        whole = with_marks(with_casts_dropped(candidate), self.names)
        if whole.simulate(blocks=False).peak <= candidate.simulate(blocks=False).peak:
            return whole
        return marked_inplace(without_needless_casts(candidate), self.names)

    def measured(self, candidate: Candidate) -> Measured | None:
        """What the device says of a candidate, None where it is not asked."""
        return self.bench.measure(candidate.build()) if self.bench.on_cuda and self.measures else None
