"""The plans that there are for a graph, and which of them suits what is known of its step."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from memrewrite.backends.frontier import Found, Frontier
from memrewrite.backends.plan import Division


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

    def division(self, found: Found) -> Division | None:
        """How forward is divided in a plan; None for PyTorch's own."""
        return None if found is self.usual else found.order.ways.division

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
