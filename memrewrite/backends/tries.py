"""Which plans of a graph are compiled, one after the other, by what the code of those before took.

Inductor's code takes more than was foreseen of a plan, or less, and by another amount for each division of forward,
with gradients made apart or not: 4 layers of Qwen3 0.6B, of which 2.211 GB were foreseen, took 2.558 GB, and 2.262 GB
apart, as long as Inductor fused what it would; another division, of which 2.213 GB were foreseen, took 2.274 GB and
2.237 GB. What code took too much is remembered for its division alone.

A search gives what to compile next, and is sent the bytes that its code makes. The one for a budget ends on the very
path of the one for the lowest peak, so that no budget is refused that is above what that one ends with.
"""

from collections.abc import Generator
from dataclasses import dataclass

from memrewrite.backends.choices import Options
from memrewrite.backends.frontier import Found
from memrewrite.backends.plan import Division

NEAR = 1.02  # of the lowest bytes that are foreseen: code that takes no more is not tried to be lowered
_CHEAPEST = 3  # plans for a budget, before those for the lowest peak
_LOWEST = 3  # plans for the lowest peak


@dataclass(frozen=True)
class Try:
    """A plan to be compiled; ``apart``: gradients are kept from being made together, which takes less where they lie
    far apart. ``choice`` is one of ``memrewrite.records.compiled.CHOICES``; losses make so many times fewer rows of
    logits at a time as ``share`` says."""

    found: Found
    choice: str
    apart: bool = False
    share: int = 1

    @property
    def code(self) -> tuple[object, ...]:
        """What is the same where the code is."""
        order = self.found.order
        steps = tuple(step for part in order.parts for step in part.steps)
        return order.saved, steps, self.apart, self.share


Search = Generator[Try, int, int | None]
"""What to compile next; it is sent the bytes that the code makes, and ends with the fewest of the search for the lowest
peak, None without one."""


@dataclass(frozen=True)
class Step:
    """Bytes of the step: ``base`` live besides what the graph makes, and at least ``floor`` in the optimizer."""

    base: int
    floor: int

    def peak(self, made: int) -> int:
        """The peak of the step where the graph makes so much."""
        return max(self.base + made, self.floor)

    def gains(self, best: int, made: int) -> bool:
        """Whether ``made`` bytes are fewer than ``best`` so that it is worth compiling."""
        return self.peak(best) > self.peak(made) * NEAR


class Tries:
    """A search at work: ``now`` is to be compiled, None once it has ended, with ``lowest`` bytes at least.

    What another plan was compiled to is not compiled again.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self.all: list[tuple[Try, int]] = []
        self._taken: dict[tuple[object, ...], int] = {}
        self.now: Try | None = None
        self.lowest: int | None = None
        self._go_on(None)

    def tell(self, made: int) -> None:
        """The code of what was to be compiled makes so many bytes."""
        assert self.now is not None  # noqa: S101  (see there)
        self.all.append((self.now, made))
        self._taken[self.now.code] = made
        self._go_on(made)

    def _go_on(self, made: int | None) -> None:
        try:
            self.now = next(self._search) if made is None else self._search.send(made)
            while (known := self._taken.get(self.now.code)) is not None:
                self.now = self._search.send(known)
        except StopIteration as ended:
            self.now, self.lowest = None, ended.value


def one(found: Found, choice: str, step: Step) -> Search:
    """One plan; with gradients apart, too, where its code takes more than is foreseen."""
    made = yield Try(found, choice)
    if step.gains(made, found.peaks.peak):
        made = min(made, (yield Try(found, choice, apart=True)))
    return made


def lowest(options: Options, step: Step) -> Search:
    """The lowest peak by the code: the plan that is foreseen to be lowest, then those of other divisions.

    The next one is that of which the fewest bytes are expected, as long as these are fewer than what is reached: what
    is foreseen, and what the code of its division took besides. Of divisions of which nothing is known nothing besides
    is expected until two are known, then the least of these.
    """
    first = options.lowest()
    first = options.frontier.within(max(first.peaks.peak, step.floor - step.base)) or first
    first, share = options.with_most_rows(first, max(options.frontier.takes(first), step.floor - step.base))
    plain = yield Try(first, "lowest", share=share)
    if not step.gains(plain, first.peaks.peak):
        return plain
    best = min(plain, (yield Try(first, "lowest", True, share)))
    apart = best < plain
    beyond: dict[Division | None, int] = {options.division(first): best - first.peaks.peak}
    tried = {Try(first, "").code}

    def expected(found: Found) -> int:
        unknown = min(beyond.values()) if len(beyond) > 1 else 0
        return options.frontier.takes(found) + beyond.get(options.division(found), unknown)

    for _ in range(_LOWEST - 1):
        others = [each for each in options.lowest_of_each() if Try(each, "").code not in tried]
        found = min(others, key=lambda each: (expected(each), each.ms), default=first)
        if not step.gains(best, expected(found)):
            return best
        found, share = options.with_most_rows(found, options.frontier.takes(found))
        made = yield Try(found, "lowest", apart, share)
        best = min(best, made)
        beyond[options.division(found)] = made - found.peaks.peak
        tried.add(Try(found, "").code)
    return best


def cheapest(options: Options, room: int, own: int) -> Search:
    """The cheapest plans of which at most ``room`` bytes are foreseen with what later graphs keep, and ``own`` without.

    What the code of one took besides is expected of its division; of others, the least of what is known.
    """
    beyond: dict[Division | None, int] = {}
    apart: bool | None = None  # not known yet which of both takes less

    def expected(division: Division | None) -> int:
        return beyond.get(division, max(min(beyond.values(), default=0), 0))

    for _ in range(_CHEAPEST):
        found = options.within(room, own, expected)
        if found is None:
            return None
        choice = "usual" if found is options.usual else "cheapest"
        found, share = options.with_most_rows(found, room)
        made = yield Try(found, choice, bool(apart), share)
        if apart is None:
            other = yield Try(found, choice, True, share)
            apart, made = other <= made, min(made, other)
        division = options.division(found)
        beyond[division] = max(beyond.get(division, 0), made - found.peaks.peak)
    return None
