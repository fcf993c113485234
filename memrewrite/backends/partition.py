"""The partitioner: divides a joint graph so that the step stays within its budget, at the least time."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memrewrite.backends.asked import Asked
from memrewrite.backends.choices import InStep, Options
from memrewrite.backends.facts import Facts, facts, same
from memrewrite.backends.frontier import Found, Frontier
from memrewrite.backends.graphs import graphs
from memrewrite.backends.listed import kept_by, reruns
from memrewrite.backends.observed import Seen
from memrewrite.backends.outcomes import Foreseen, Outcome
from memrewrite.backends.resident import Resident, parts
from memrewrite.backends.rows import sum_in_place, written
from memrewrite.backends.sizes_alone import give_sizes_alone
from memrewrite.backends.stored import stored
from memrewrite.backends.tries import Search, Step, Tries, Try, cheapest, lowest, one
from memrewrite.process.garbage import not_sought
from memrewrite.records.errors import BudgetInfeasibleError, MemrewriteError
from memrewrite.records.options import format_bytes
from memrewrite.torch_internals.compiling import let_through
from memrewrite.torch_internals.partitioning import is_ours, prepared, stock_partition, stock_saved

_FROM_CACHE = 5  # tries for the lowest peak of code of which no plan is known, at most
_HOPELESS = 1.5  # of what is foreseen code took 12 % less at most: beyond this nothing is compiled to tell
_LOSS_ALONE = (
    '  - the loss alone from forward, as of memrewrite.optimize(..., returns="loss") first: what it returns besides, '
    "and the zeros that are its gradient, take {}"
)


class Partition:
    """Divides the joint graph of one graph of Dynamo's; ``choice`` and ``foreseen`` tell how, once it has.

    ``choice`` is one of ``memrewrite.records.compiled.CHOICES``; ``verified`` says how the graph was compared.
    ``observed`` is the peak of the step by the code that was compiled, None where it is not known, for which ``unseen``
    has the reason; ``taken`` has for each plan that was compiled the bytes that its code makes, and ``outcomes`` all
    that came of it. ``apart``: gradients are kept from being made together, which takes less where they lie far apart.
    ``options`` are the plans that it had, until those of its step are settled, and ``in_step`` what it knew of other
    graphs, None where it seemed to be alone; ``replaced`` says that there is another of the same graph. So many bytes
    ``more`` are kept at another call of it than as it is compiled, and ``before_loss`` are there besides what it keeps,
    once forward is through, where that is known. ``highest`` is the peak of other steps: a budget in percent is of the
    largest, so that a last batch that is smaller may take as much. It is ``known`` what the graph was told in a step
    that a process has settled before. ``alone`` is the peak of a graph without a backward, by its code, while it runs,
    and ``measured`` what a step took on a GPU; each is None as long as it is not known. Of the outputs that the caller
    keeps there are ``given_out`` bytes, and ``kept`` are those of what is kept for backward. It ``communicates`` where
    its code has collectives.
    """

    def __init__(
        self,
        asked: Asked,
        lives: Resident,
        fused: bool = True,
        in_step: InStep | None = None,
        more: int = 0,
        before_loss: int | None = None,
        highest: int = 0,
        known: bool = False,
    ) -> None:
        self.known, self.more = known, more
        self.asked, self.lives, self.fused, self.in_step = asked, lives, fused, in_step
        self.options: Options | None = None
        self.replaced = self.apart = self.communicates = False
        self.share = 1  # how many times fewer rows losses make at a time
        self.divisions = 0  # how often it divided the graph
        self.base = lives.base + asked.reserve + more
        self.outside = max(asked.loss - lives.others, 0)  # by which plans are made: a loss ends before gradients begin
        self.loss = self.outside
        if asked.loss and before_loss is not None:
            self.loss = max(before_loss + asked.loss - self.base, 0)
        self.highest = highest if in_step is None else 0  # of which graphs of a step have the budget told
        self.held = asked.keeps_output and not lives.later  # what later graphs are given dies with the step
        self.foreseen: Foreseen | None = None
        self.choice, self.verified = "no backward", ""
        self.taken: list[int] = []
        self.outcomes: list[Outcome] = []
        self.observed: int | None = None
        self.alone: int | None = None
        self.measured: int | None = None
        self.unseen = ""
        self.given_out = self.kept = 0
        self._tries: Tries | None = None
        self._left: tuple[int, int] | None = None

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
        self.divisions += 1
        self._left = None
        static = static_lifetime_input_indices or []
        if self.asked.budget is not None:
            sum_in_place(joint)
            give_sizes_alone(joint)
        joint, divided = prepared(joint, static, num_fwd_outputs)
        if self.asked.budget is None or not is_ours(joint, divided):
            self.choice = "no budget" if self.asked.budget is None else "not ours"
            outputs: Any = {"num_fwd_outputs": num_fwd_outputs, "static_lifetime_input_indices": static}
            forward, backward = stock_partition(joint, inputs, **outputs)
            return forward, written(backward)
        known = facts(joint, divided, self.fused, self.held)
        known = replace(known, stored=stored(known), outside=self.outside)
        self.given_out = known.held
        usual = stock_saved(joint, divided)
        stock = {i for i, node in enumerate(known.nodes) if node in usual}
        try:
            with not_sought():
                found = self.chosen(known, frozenset(stock))
        except MemrewriteError as error:
            raise let_through(error) from None
        forward, backward = graphs(joint, divided, known, found.order, num_fwd_outputs, self.apart, self.share)
        return forward, written(backward)

    def chosen(self, known: Facts, stock: frozenset[int]) -> Found:
        """The plan that is the next to be tried."""
        options = self._options(known, frozenset(i for i in stock if i not in known.symbols))
        limit = self._limit(self._of_step(options.usual))
        if limit is not None and self.at_optimizer > limit and not self.asked.lowest:
            raise self._infeasible(limit, options.fewest.lowest())
        if self._tries is None:
            self._tries = Tries(self._search(options, limit))
            for taken in self.taken:  # of code from caches, which nothing divided
                if self._tries.now is not None:
                    self._tries.tell(taken)
        now = self._tries.now
        if now is None and self.asked.lowest:  # all had been tried when that code was made
            now, _ = min(self._tries.all, key=lambda each: each[1])
        if now is None:
            assert limit is not None  # noqa: S101  (else there is a plan)
            raise self._infeasible(limit, options.fewest.lowest(), self._tries.lowest)
        self._take(options, now)
        return now.found

    def _options(self, known: Facts, stock: frozenset[int]) -> Options:
        """The plans for these facts, where PyTorch keeps ``stock``; those of the try before, if it was the same."""
        there = self.options
        if there is None or there.usual.order.saved != stock or not same(there.frontier.facts, known):
            frontier = Frontier(known, self.lives.later)
            there = Options(frontier, frontier.found(frontier.planner.given(stock)))
            self.options, self._tries = there, None
        return there

    def _take(self, options: Options, now: Try) -> None:
        """What is compiled is this one."""
        found, known = now.found, options.frontier.facts
        self.choice, self.apart, self.share, options.chosen = now.choice, now.apart, now.share, found
        self._left = options.frontier.left(found, self._room(options, now))
        self.foreseen = Foreseen(
            before=self._of_step(options.usual),
            after=self._of_step(found),
            kept_before=options.usual.peaks.saved,
            kept=found.peaks.saved,
            regions=len(found.order.kept),
            ms=found.ms,
            kept_by=kept_by(known, found.order),
            reruns=reruns(known, found.order),
        )

    def room(self, backward: bool) -> int | None:
        """The bytes that the forward or the backward graph that it has just made may make and let go of."""
        return None if self._left is None else self._left[backward]

    def _room(self, options: Options, now: Try) -> int:
        """The bytes that kernels are fused within: those that are foreseen, or that do not count.

        The first code of a plan for a budget may take all of that.
        """
        least = max(now.found.peaks.peak, self.at_optimizer - self.base)
        limit = self._limit(self._of_step(options.usual))
        if limit is None or now.apart or self.in_step is not None:
            return least
        return max(least, limit - self.base)

    def _limit(self, original: int) -> int | None:
        """The bytes of the budget; None for the lowest peak, and for a share of a step of which too little is known."""
        assert self.asked.budget is not None  # noqa: S101  (see there)
        if self.in_step is None:
            limit = self.asked.budget.resolve(original)
            return limit if limit is None or self.asked.budget.bytes is not None else max(limit, self.highest)
        return self.asked.budget.bytes if self.in_step.room is None else self.in_step.limit

    def _search(self, options: Options, limit: int | None) -> Search:
        """What to compile for what is asked for, and known of the step."""
        told, own = self.in_step, None if limit is None else limit - self.base
        step = Step(self.base, self.at_optimizer)
        if told is None and own is None:
            return (yield from lowest(options.fewest, step))
        if told is not None and self.tells_options:
            found = (options.within(own or sys.maxsize) if told.late else None) or options.least(own)
            if own is None or told.late or found.peaks.peak <= own:
                made = yield from one(found, "first step", step)
            if own is None:
                return made
        elif told is not None and (self.asked.lowest or own is None):
            return (yield from one(options.told(told, self.base), "lowest", step))
        assert own is not None  # noqa: S101  (see above)
        if told is None:
            yield from cheapest(options, own, own)
            if options.fewer is not None:
                yield from cheapest(options.fewer, own, own)
        elif told.room is not None:  # of which others have had a guess, which may be too much: perhaps they keep less
            yield from cheapest(options, told.room, own)
            found = options.least(own)
            if found.peaks.peak <= own:
                yield from one(found, "usual" if found is options.usual else "cheapest", step)
        of_code = self.asked.budget is not None and self.asked.budget.bytes is not None
        if not of_code or options.fewest.lowest().peaks.peak > own * _HOPELESS:
            return None
        return (yield from lowest(options.fewest, step))

    def observe(self, found: Seen | str, cached: bool = False) -> bool:
        """Take over what the compiled code takes, or why that is not known; says whether to compile another plan.

        A budget in percent is one of what is foreseen, and is compared with that alone; so is the lowest peak, of which
        a few percent more are none. Of code that is ``cached`` it may not be known which plan it is of. Raises
        ``BudgetInfeasibleError`` where there is no other plan for a budget.
        """
        if cached:
            self._of_cache()
        if isinstance(found, Seen) and not found.has_backward:
            self._take_alone(found.forward)
            found = ""  # nothing of a plan is to be told
        if isinstance(found, str):
            made, self.unseen = None, found
        else:
            made, self.unseen, self.given_out, self.kept = self._made(found), "", found.given_out, found.kept
        self.observed = None if made is None else self._with_optimizer(made)
        plan = None if self.options is None else self.options.chosen
        if made is None and plan is not None:
            self.kept = plan.peaks.saved
        known = self.observed, self.unseen, self.kept
        self.outcomes.append(Outcome(plan, self.apart, self.choice, self.foreseen, *known))
        if made is None and plan is not None:
            made = plan.peaks.peak
        limit = self._of_code
        if made is None or not (self.asked.lowest or (limit is not None and self._with_optimizer(made) > limit)):
            return False
        self.taken.append(made)
        if self._tries is None:
            return self._without_plans(limit)
        if self._tries.now is None:
            return False
        self._tries.tell(made)
        if self._tries.now is None and limit is not None:
            assert self.options is not None  # noqa: S101  (tries are of them)
            raise self._infeasible(limit, self.options.fewest.lowest(), self._tries.lowest)
        return self._tries.now is not None

    def _take_alone(self, made: int) -> None:
        """The graph has no backward, and makes so many bytes before later graphs make gradients.

        Raises ``BudgetInfeasibleError`` where that is a part of the step, and more than the budget.
        """
        made -= self.lives.others
        self.alone, limit = self.base + made, self._of_code
        self.choice = "no backward" if torch.is_grad_enabled() else "no gradients"
        if self.choice == "no backward" and limit is not None and self.alone > limit:
            raise self._infeasible(limit, None, made)

    def _made(self, found: Seen) -> int:
        """The bytes that code makes, without those that are counted for biases where it adds none."""
        loss = found.kept + self.loss if self.loss and found.has_backward else 0
        return max(found.forward, found.backward, loss) - (0 if found.biases else self.lives.biases)

    @property
    def _of_code(self) -> int | None:
        """The bytes of the budget that code is compared with; None without any."""
        late = self.in_step is not None and self.in_step.late
        return None if self.asked.budget is None or late else self.asked.budget.bytes

    def _of_cache(self) -> None:
        """Nothing divided the graph: it is of the next plan, where plans are known."""
        if self.options is not None and self._tries is not None and self._tries.now is not None:
            self._take(self.options, self._tries.now)
        else:
            self.foreseen, self.choice = None, "no backward"

    def _without_plans(self, limit: int | None) -> bool:
        """As ``observe`` of code that is beyond the budget, or not known to be the lowest."""
        if self.choice != "not ours":
            return limit is not None or len(self.taken) < _FROM_CACHE
        if limit is None:
            return False
        raise self._infeasible(limit, None, self.taken[-1])

    def settle(self) -> int:
        """Which try stays: of those for the lowest peak the one whose code takes least, else the last one."""
        number = len(self.outcomes) - 1
        if self.asked.lowest:
            known = [(each.observed, i) for i, each in enumerate(self.outcomes) if each.observed is not None]
            number = min(known, default=(0, number))[1]
        stays = self.outcomes[number]
        self.apart, self.choice, self.foreseen = stays.apart, stays.choice, stays.foreseen
        self.observed, self.unseen, self.kept = stays.observed, stays.unseen, stays.kept
        if self.options is not None and stays.found is not None:
            self.options.chosen = stays.found
        self._tries, self.outcomes = None, []  # hold graphs
        return number

    @property
    def has_plans(self) -> bool:
        """Whether it is of a graph with a backward that is divided here, or was for a cache."""
        known = self.foreseen is not None or self.observed is not None or bool(self.unseen)
        return known and self.choice not in ("not ours", "no budget")

    def set_before(self, peak: int | None) -> None:
        """With PyTorch's own plans the step takes ``peak`` bytes, where that is known."""
        if self.foreseen is not None and peak is not None:
            self.foreseen = replace(self.foreseen, before=peak)

    @property
    def peak(self) -> int | None:
        """The peak of the step in bytes, by the code, else as it is foreseen; None where nothing is known of it."""
        foreseen = None if self.foreseen is None else self.foreseen.after
        return foreseen if self.observed is None else self.observed

    def keep(self, choice: str, peak: int) -> None:
        """What was compiled stays, in a step that takes ``peak`` bytes."""
        self.choice = choice
        if self.observed is not None:
            self.observed = peak
        elif self.foreseen is not None:
            self.foreseen = replace(self.foreseen, after=peak)

    def peak_of(self, found: Found, others: int, batch: int, by_code: bool) -> int:
        """The bytes of the step at its peak with another plan, in this graph or in the optimizer.

        So many bytes of ``others`` live while the graph runs besides what was known as it was compiled; while the
        optimizer works, the ``batch`` does. ``by_code``: what took more than was foreseen will again.
        """
        beyond = 0
        if by_code and self.foreseen is not None and self.observed is not None:
            beyond = self.observed - self.foreseen.after
        return max(self.base + found.peaks.peak + max(beyond, 0) + others, self._beside_optimizer(batch))

    def _of_step(self, found: Found) -> int:
        """The bytes of the step at its peak, in this graph or in the optimizer."""
        return self._with_optimizer(found.peaks.peak)

    @property
    def at_optimizer(self) -> int:
        """What lives at most while the optimizer works: the outputs, too, and of a graph that is all the batch."""
        return self._beside_optimizer(self.lives.inputs if self.in_step is None else self.in_step.batch)

    def _beside_optimizer(self, batch: int) -> int:
        return self.lives.of_optimizer + self.asked.reserve + self.given_out + batch

    def _with_optimizer(self, made: int) -> int:
        return max(self.base + made, self.at_optimizer)

    def _infeasible(self, limit: int, lowest: Found | None, reached: int | None = None) -> BudgetInfeasibleError:
        """The error; the graph makes ``reached`` bytes at least by its code, else those foreseen of the ``lowest``."""
        made = reached if reached is not None or lowest is None else lowest.peaks.peak
        least = self._with_optimizer(made or 0)
        there = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts(self.lives))
        kind = "foreseen" if reached is None else "reachable"  # of which code was compiled
        message = (
            f"No plan for torch.compile fits {format_bytes(limit)}: the lowest {kind} peak is "
            f"{format_bytes(least, up=True)} ({there}). What else would fit:"
        )
        return BudgetInfeasibleError(message, least, tuple(self._advice(limit, made or 0)))

    def _advice(self, limit: int, lowest: int) -> list[str]:
        """What of a leaner optimizer, of the loss alone and of smaller batches would fit, by what is known here."""
        made = lowest - self.lives.gradients
        found = []
        beside = 0 if self.options is None else self.options.frontier.facts.beside_loss
        if beside and self.base + lowest - beside <= limit:
            found.append(_LOSS_ALONE.format(format_bytes(beside)))
        if self.lives.state and self.base - self.lives.state + lowest <= limit:
            found.append("  - SGD without momentum: another optimizer wants another learning rate")
        least = self.base - self.lives.inputs + self.lives.gradients
        for parts_of in (2, 4, 8, 16, 32):
            if least + (made + self.lives.inputs) / parts_of <= limit:
                found.append(f"  - about {parts_of} micro-batches with gradient accumulation")
                break
        return found or ["  - nothing that is known here; memrewrite.optimize tries more."]
