"""The plans that there are for a graph, and which of them suits what is known of its step."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from memrewrite.backends.facts import with_fewer_rows
from memrewrite.backends.frontier import Found, Frontier
from memrewrite.backends.live import Live
from memrewrite.backends.plan import Division
from memrewrite.backends.scratch import shares


@dataclass(frozen=True)
class InStep:
    """What a graph of several in a step is to know of the others: nothing, until a first step is over.

    ``room`` are the bytes that its plan may take, with what later graphs keep, and ``limit`` those of the whole step,
    None where that is to be as low as can be and nothing is known of it. ``late``: it comes after graphs that were
    divided as if there were no others, so that the first step may take more than its budget. ``batch`` are the bytes
    that the first of them is given.
    """

    room: int | None = None
    limit: int | None = None
    late: bool = False
    batch: int = 0


@dataclass
class Options:
    """The plans that there are for a graph; ``usual`` is PyTorch's own, ``chosen`` the one that it was given.

    ``by_share`` tells their peaks where losses make more rows of logits at a time: how many times fewer than they were
    told, the most rows first.
    """

    frontier: Frontier
    usual: Found
    chosen: Found | None = None
    by_share: tuple[tuple[int, Live], ...] = ()

    @functools.cached_property
    def fewer(self) -> "Options | None":
        """The plans where losses make as few rows of logits at a time as they may; None where that changes nothing."""
        known = self.frontier.facts
        *more, fewest = known, *(with_fewer_rows(known, share) for share in shares(known.nodes))
        if fewest.scratch == known.scratch:
            return None
        frontier = Frontier(fewest, self.frontier.later, self.frontier.planner)
        usual = frontier.found(frontier.planner.given(self.usual.order.saved))
        return Options(frontier, usual, by_share=tuple((each.share, Live(each)) for each in more))

    @property
    def fewest(self) -> "Options":
        """The same, or these plans where there are no such."""
        return self.fewer or self

    def with_most_rows(self, found: Found, room: int) -> tuple[Found, int]:
        """A plan where losses make as many rows at a time as ``room`` bytes allow, and how many times fewer these are.

        As few as they are planned with where these are too many, too.
        """
        for share, live in self.by_share:
            more = replace(found, peaks=live.peaks(found.order))
            if self.frontier.takes(more) <= room:
                return more, share
        return found, self.frontier.facts.share

    def division(self, found: Found) -> Division | None:
        """How forward is divided in a plan; None for PyTorch's own."""
        return None if found.order is self.usual.order else found.order.ways.division

    def within(
        self, room: int, own: int = sys.maxsize, beyond: Callable[[Division | None], int] = lambda division: 0
    ) -> Found | None:
        """PyTorch's own plan where it takes at most ``room`` bytes, and at most ``own`` without what later graphs keep,
        else the cheapest that does; None without one. Those of a division take ``beyond`` more than foreseen."""
        more = beyond(None)
        usual_fits = self.frontier.fits(self.usual, room - more, own - more)
        return self.usual if usual_fits else self.frontier.within(room, own, beyond)

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
        return min(self.lowest_of_each(), key=lambda each: (self.frontier.takes(each), each.ms))

    def lowest_of_each(self) -> list[Found]:
        """The plan of the lowest peak of each division, and PyTorch's own."""
        return [self.usual, *(row.lowest for row in self.frontier.rows)]
