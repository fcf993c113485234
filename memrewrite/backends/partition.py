"""The partitioner: divides a joint graph so that the step stays within its budget, at the least time."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from memrewrite.backends.asked import Asked
from memrewrite.backends.facts import Facts, facts
from memrewrite.backends.frontier import Found, Frontier
from memrewrite.backends.graphs import graphs
from memrewrite.backends.listed import kept_by, reruns
from memrewrite.backends.observed import Seen
from memrewrite.backends.resident import Resident, parts
from memrewrite.backends.rows import sum_in_place, written
from memrewrite.process.garbage import sought_seldom
from memrewrite.records.errors import BudgetInfeasibleError, MemrewriteError
from memrewrite.records.options import format_bytes
from memrewrite.torch_internals.compiling import let_through
from memrewrite.torch_internals.partitioning import is_ours, prepared, stock_partition, stock_saved

_NEAR = 1.02  # of the bytes foreseen for the lowest peak


@dataclass(frozen=True)
class Foreseen:
    """What a division of one graph takes, in bytes: the peak of the step, before and after, and what is kept.

    ``ms`` is what running nodes again takes; ``kept_by`` has what is kept and ``reruns`` how much runs again, by
    operator, most first.
    """

    before: int
    after: int
    kept_before: int
    kept: int
    regions: int
    ms: float
    kept_by: dict[str, int]
    reruns: dict[str, int]


@dataclass(frozen=True)
class InStep:
    """What a graph of several in a step is to know of the others: nothing, until a first step is over.

    ``room`` are the bytes that its plan may take, with what later graphs keep, and ``limit`` those of the whole step,
    None where that is to be as low as can be and nothing is known of it. ``late``: it comes after graphs that were
    divided as if there were no others, so that the first step may take more than its budget.
    """

    room: int | None = None
    limit: int | None = None
    late: bool = False


@dataclass
class Options:
    """The plans that there are for a graph; ``usual`` is PyTorch's own, ``chosen`` the one that it was given."""

    frontier: Frontier
    usual: Found
    chosen: Found | None = None

    def within(self, room: int, own: int = sys.maxsize) -> Found | None:
        """PyTorch's own plan where it takes at most ``room`` bytes, and at most ``own`` without what later graphs keep,
        else the cheapest that does; None without one."""
        return self.usual if self.frontier.fits(self.usual, room, own) else self.frontier.within(room, own)

    def least(self, room: int | None) -> Found:
        """What leaves most to other graphs: what keeps least with a peak of at most ``room`` bytes, where that is known
        and there is any, else the lowest."""
        if room is None:
            return self.lowest()
        fitting = [each for each in (self.frontier.least(room), self.usual) if each and each.peaks.peak <= room]
        return min(fitting, key=lambda each: (each.peaks.saved, each.peaks.peak)) if fitting else self.lowest()

    def told(self, told: InStep, base: int) -> Found:
        """The cheapest plan for what is told of a step of which ``base`` bytes live besides what the graph makes; where
        none takes so little, or no room is told, what leaves most."""
        own = sys.maxsize if told.limit is None else told.limit - base
        within = None if told.room is None else self.within(told.room, own)
        return within or self.least(None if told.limit is None else own)

    def lowest(self) -> Found:
        """The plan of the lowest peak, with what later graphs keep."""
        return min(self.usual, self.frontier.lowest(), key=lambda each: (self.frontier.takes(each), each.ms))


class Partition:
    """Divides the joint graph of one graph of Dynamo's; ``choice`` and ``foreseen`` tell how, once it has.

    ``choice`` is one of ``memrewrite.records.compiled.CHOICES``; ``verified`` says how the graph was compared.
    ``observed`` is the peak of the step by the code that was compiled, None where it is not known, for which ``unseen``
    has the reason; ``excesses`` has for each plan that was compiled and given up by how many bytes its code was beyond
    the budget; ``apart``: gradients are kept from being made together, which takes less where they lie far apart.
    ``options`` are the plans that it had, until those of its step are settled, and ``in_step`` what it knew of other
    graphs, None where it seemed to be alone; ``replaced`` says that there is another of the same graph.
    """

    def __init__(self, asked: Asked, lives: Resident, fused: bool = True, in_step: InStep | None = None) -> None:
        self.asked, self.lives, self.fused, self.in_step = asked, lives, fused, in_step
        self.options: Options | None = None
        self.replaced = self.apart = False
        self.base = lives.base + asked.reserve
        self.held = asked.keeps_output and not lives.later  # what later graphs are given dies with the step
        self.foreseen: Foreseen | None = None
        self.choice, self.verified = "no backward", ""
        self.excesses: list[int] = []
        self.observed: int | None = None
        self.unseen = ""

    @property
    def tells_options(self) -> bool:
        """Whether it is to be asked for another plan once more is known of the step."""
        return self.in_step is not None and self.in_step.room is None

    def __call__(
        self,
        joint: fx.GraphModule,
        inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph; raises ``BudgetInfeasibleError``, as Dynamo lets it through."""
        static = static_lifetime_input_indices or []
        if self.asked.budget is not None:
            sum_in_place(joint)
        joint, divided = prepared(joint, static, num_fwd_outputs)
        if self.asked.budget is None or not is_ours(joint, divided):
            self.choice = "no budget" if self.asked.budget is None else "not ours"
            outputs: Any = {"num_fwd_outputs": num_fwd_outputs, "static_lifetime_input_indices": static}
            forward, backward = stock_partition(joint, inputs, **outputs)
            return forward, written(backward)
        known = facts(joint, divided, self.fused, self.held)
        usual = stock_saved(joint, divided)
        stock = {i for i, node in enumerate(known.nodes) if node in usual}
        try:
            with sought_seldom():
                found = self.chosen(known, frozenset(stock))
        except MemrewriteError as error:
            raise let_through(error) from None
        forward, backward = graphs(joint, divided, known, found.order, num_fwd_outputs, self.apart)
        return forward, written(backward)

    def chosen(self, known: Facts, stock: frozenset[int]) -> Found:
        """PyTorch's own choice where it fits, else the cheapest that does."""
        assert self.asked.budget is not None  # noqa: S101  (else the stock partitioner divides)
        frontier = Frontier(known, self.lives.later)
        kept = frozenset(i for i in stock if i not in known.symbols)
        order = frontier.planner.given(kept)
        usual = frontier.found(order)
        self.options = options = Options(frontier, usual)
        limit = self._limit(self._of_step(usual))
        found = self._picked(options, limit)
        if limit is not None and self.lives.of_optimizer + self.asked.reserve > limit and not self.asked.lowest:
            raise self._infeasible(limit, found)
        options.chosen = found
        self.foreseen = Foreseen(
            before=self._of_step(usual),
            after=self._of_step(found),
            kept_before=usual.peaks.saved,
            kept=found.peaks.saved,
            regions=len(found.order.kept),
            ms=found.ms,
            kept_by=kept_by(known, found.order),
            reruns=reruns(known, found.order),
        )
        return found

    def _limit(self, original: int) -> int | None:
        """The bytes of the budget; None for the lowest peak, and for a share of a step of which too little is known."""
        assert self.asked.budget is not None  # noqa: S101  (see there)
        if self.in_step is None:
            return self.asked.budget.resolve(original)
        return self.asked.budget.bytes if self.in_step.room is None else self.in_step.limit

    def _picked(self, options: Options, limit: int | None) -> Found:
        """The plan of ``options`` for what is asked for, and known of the step."""
        told = self.in_step
        if told is not None and self.tells_options:
            own = None if limit is None else limit - self.base
            self.choice = "first step"
            found = (options.within(own or sys.maxsize) if told.late else None) or options.least(own)
            if limit is not None and found.peaks.peak > limit - self.base and not told.late:
                raise self._infeasible(limit, found)
            return found
        if told is not None and self.asked.lowest:
            self.choice = "lowest"
            return options.told(told, self.base)
        if limit is None:
            self.choice, found = "lowest", options.lowest()
            room = max(found.peaks.peak, self.lives.of_optimizer - self.lives.base)
            return options.frontier.within(room) or found
        return self._fitting(options, limit)

    def _fitting(self, options: Options, limit: int) -> Found:
        """What fits, after the plans whose code did not: each next one is foreseen to take so much less."""
        own, beyond = limit - self.base, 0
        told = None if self.in_step is None else self.in_step.room
        room = own if told is None else told
        given_up = iter(self.excesses)
        while True:
            found = options.within(room, own)  # of the room others have had a guess, which may be too much
            if found is None:  # perhaps later graphs keep less
                found = options.least(None if told is None else own)
                if found.peaks.peak > (room if told is None else own):
                    raise self._infeasible(limit, found, beyond)
            self.choice = "usual" if found is options.usual else "cheapest"
            if (excess := next(given_up, None)) is None:
                return found
            beyond = excess + own - found.peaks.peak
            room = min(room - 1, options.frontier.takes(found) - excess)

    def observe(self, found: Seen | str) -> int:
        """Take over what the compiled code takes, or why that is not known; returns the bytes beyond the budget.

        A budget in percent is one of what is foreseen, and is compared with that alone; so is the lowest peak, of which
        a few percent more are none, where it is known: Inductor's caches do not tell.
        """
        if isinstance(found, str):
            self.unseen, self.observed = found, None
            return 0
        self.unseen, self.observed = "", self._with_optimizer(max(found.forward, found.backward))
        budget = self.asked.budget
        limit = None if budget is None or (self.in_step is not None and self.in_step.late) else budget.bytes
        if self.asked.lowest:
            limit = 0 if self.foreseen is None else int(self.foreseen.after * _NEAR)
        return 0 if limit is None else self.observed - limit

    def keep(self, choice: str, peak: int) -> None:
        """What was compiled stays, in a step that takes ``peak`` bytes."""
        self.choice = choice
        if self.observed is not None:
            self.observed = peak
        elif self.foreseen is not None:
            self.foreseen = replace(self.foreseen, after=peak)

    def peak_of(self, found: Found) -> int:
        """The bytes of the step at its peak with another plan; code that took more than was foreseen will again."""
        beyond = 0 if self.foreseen is None or self.observed is None else self.observed - self.foreseen.after
        return self._of_step(found) + max(beyond, 0)

    def _of_step(self, found: Found) -> int:
        """The bytes of the step at its peak, in this graph or in the optimizer."""
        return self._with_optimizer(found.peaks.peak)

    def _with_optimizer(self, made: int) -> int:
        return max(self.base + made, self.lives.of_optimizer + self.asked.reserve)

    def _infeasible(self, limit: int, lowest: Found, beyond: int = 0) -> BudgetInfeasibleError:
        """The error; code took ``beyond`` bytes more than was foreseen of it, as far as some was compiled."""
        reached = self._with_optimizer(lowest.peaks.peak + beyond)
        reached = min([reached, *(limit + excess for excess in self.excesses)])
        made = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts(self.lives))
        message = (
            f"No plan for torch.compile fits {format_bytes(limit)}: the lowest reachable peak is "
            f"{format_bytes(reached)} ({made}). What else would fit:"
        )
        return BudgetInfeasibleError(message, reached, tuple(self._advice(limit, lowest)))

    def _advice(self, limit: int, lowest: Found) -> list[str]:
        """What of a leaner optimizer and of smaller batches would fit, by what is known here."""
        made = lowest.peaks.peak - self.lives.gradients
        found = []
        if self.lives.state and self.base - self.lives.state + lowest.peaks.peak <= limit:
            found.append("  - SGD without momentum: another optimizer wants another learning rate")
        least = self.base - self.lives.inputs + self.lives.gradients
        for parts_of in (2, 4, 8, 16, 32):
            if least + (made + self.lives.inputs) / parts_of <= limit:
                found.append(f"  - about {parts_of} micro-batches with gradient accumulation")
                break
        return found or ["  - nothing that is known here; memrewrite.optimize tries more."]
