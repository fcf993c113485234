"""Plans of less and less memory, and the cheapest of them within a number of bytes.

For each of several divisions of forward into regions all costly nodes are kept at first. Then, step by step, those may
run again that free the most bytes of what lives at the peak for the time they take. The steps do not depend on the
budget, so a larger one never gives a dearer plan; of the last one as much is taken back as there is room for, in the
cheapest divisions first.

Where none of these is low enough, the lowest divisions are made finer or make things again from further back.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from heapq import heappop, heappush

from memrewrite.backends.divisions import divisions, may_cut
from memrewrite.backends.facts import Facts
from memrewrite.backends.live import Live, Peaks
from memrewrite.backends.plan import Division, Item, Order, Planner, Ways

_STEPS = 16  # from all costly nodes kept to none
_TRIES = 2  # in each row that fits, of the nodes that a step gave, halved: which of them need not run again
_FURTHER = 12  # of the cheapest row so far
_TOP = 2  # of the divisions of the lowest peaks
_NEAR = 1.25  # of the lowest peak: others are not divided again
_EARLY = 8  # regions before its own from which on a region makes things again, at most

Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A plan, its peaks in bytes besides what lives all the time, and the milliseconds it takes to run nodes again."""

    order: Order
    peaks: Peaks
    ms: float

    @property
    def rank(self) -> tuple[float, int, int]:
        """The cheaper and then the lower comes first."""
        return (self.ms, self.peaks.peak, self.order.length)


class Frontier:
    """The plans for one joint graph, made once and asked for any number of bytes.

    Graphs that come ``later`` are taken to keep so many times what this one keeps, while it is kept. A ``planner`` may
    be that of facts with another ``scratch``, which tells nothing of orders.
    """

    def __init__(self, facts: Facts, later: float = 0.0, planner: Planner | None = None) -> None:
        self.facts, self.later = facts, later
        self.planner, self._live = planner or Planner(facts), Live(facts)

    @functools.cached_property
    def _divided(self) -> list["_Row"]:
        return [_Row(self, cuts) for cuts in divisions(self.facts)]

    @property
    def rows(self) -> list["_Row"]:
        """The plans of each division, those made for the lowest peak among them."""
        return [*self._divided, *self._deeper]

    @functools.cached_property
    def _deeper(self) -> list["_Row"]:
        """Rows for the lowest peak alone: regions divided again where backward needs most, and such as begin to make
        things again in regions before their own.

        All steps of such a row are looked at only where its last one is lower than that of the row it comes from.
        """
        low = sorted(self._divided, key=self._peak)
        lowest = self._peak(low[0])
        few = [row for row in low if 2 * len(row.cuts) <= len(low[0].cuts) and self._peak(row) <= _NEAR * lowest]
        again = (_Row(self, self._cuts_again(row), early=1) for row in few[:_TOP])
        found = [row for row in again if self.takes(row.last) < lowest]
        for row in low[:_TOP]:
            if min(map(self._peak, found), default=lowest) >= lowest:
                found += self._earlier(row)
        return found

    def _peak(self, row: "_Row") -> int:
        return self.takes(row.lowest)

    def _earlier(self, row: "_Row") -> Iterator["_Row"]:
        """A division that makes things again from one region before its own on, two, four, as long as that is lower."""
        early, peak = 1, self._peak(row)
        while early <= _EARLY:
            new = _Row(self, row.cuts, early)
            if self.takes(new.last) >= self.takes(row.last) or self._peak(new) >= peak:
                return
            yield new
            row, peak, early = new, self._peak(new), 2 * early

    def _cuts_again(self, row: "_Row") -> Cuts:
        """Those of a division, and further ones where each part of backward needs most."""
        order = row.last.order
        places = {self._divisible(order.items[place]) for place in self._live.crests(order)}
        return tuple(sorted({*row.cuts, *(place for place in places if place is not None)}))

    def _divisible(self, item: Item) -> int | None:
        """The node of forward to divide at so that what runs there is the first of its region."""
        facts = self.facts
        read = [item.node] if item.region is not None else facts.inputs[item.node]
        found = [self._base(node) for node in read if facts.forward[node] and node not in facts.given]
        return max((node for node in found if may_cut(facts, node)), default=None)

    def _base(self, node: int) -> int:
        """What a value lies in."""
        while node in self.facts.views and self.facts.inputs[node]:
            node = self.facts.inputs[node][0]
        return node

    def least(self, room: int) -> Found | None:
        """The plan that keeps least for backward of those whose own peak is at most ``room`` bytes."""
        found = (each for row in self._divided for each in row.all if each.peaks.peak <= room)
        return min(found, key=lambda each: (each.peaks.saved, each.peaks.peak, each.ms), default=None)

    def takes(self, found: Found) -> int:
        """The peak in bytes of a plan, with what later graphs keep."""
        return found.peaks.peak + int(self.later * found.peaks.saved)

    def left(self, found: Found, room: int) -> tuple[int, int]:
        """Of so many bytes those for what forward makes, and for what backward makes or is handed."""
        return self._live.left(found.order, room)

    def fits(self, found: Found, room: int, own: int = sys.maxsize) -> bool:
        """Whether a plan takes at most ``room`` bytes, and at most ``own`` without what later graphs keep."""
        return self.takes(found) <= room and found.peaks.peak <= own

    def within(
        self, room: int, own: int = sys.maxsize, beyond: Callable[[Division], int] = lambda division: 0
    ) -> Found | None:
        """The cheapest plan that ``fits``; None where there is none. Those of a division take ``beyond`` more."""
        return self._cheapest(self._divided, room, own, beyond) or self._cheapest(self._deeper, room, own, beyond)

    def _cheapest(self, rows: list["_Row"], room: int, own: int, beyond: Callable[[Division], int]) -> Found | None:
        """As ``within``, of these rows: the cheapest goes on until it fits, as steps make none cheaper."""
        fitting: list[_Between] = []
        best: Found | None = None
        ahead = [(0.0, number, 0) for number in range(len(rows))]  # by what the step before took
        while ahead and (best is None or ahead[0][0] <= best.ms):
            _, number, place = heappop(ahead)
            row = rows[number]
            if (found := row.at(place)) is None:
                continue
            more = beyond(row.division)
            if self.fits(found, room - more, own - more):
                fitting.append(row.between(place, room - more, own - more))
                best = min((each.best for each in fitting), key=lambda each: each.rank)
            else:
                heappush(ahead, (found.ms, number, place + 1))
        for _ in range(_FURTHER):
            if not (left := [each for each in fitting if each.ahead]):
                break
            min(left, key=lambda each: each.best.rank).go_on()
        return min((each.best for each in fitting), key=lambda each: each.rank, default=None)

    def kept(self, order: Order) -> int:
        """The bytes that an order keeps."""
        return self._live.kept(order)

    def look(self, ways: Ways) -> Found:
        """A choice with its peaks and cost."""
        return self.found(self.planner.order(ways))

    def found(self, order: Order) -> Found:
        """An order with its peaks and cost."""
        return Found(order, self._live.peaks(order), order.ms)


class _Row:
    """The plans of one division, from all that is costly kept to as little as can be, made as they are asked for."""

    def __init__(self, frontier: Frontier, cuts: Cuts, early: int = 0) -> None:
        self._all, self._facts, self.cuts, self.early = frontier, frontier.facts, cuts, early
        self._found: list[Found] = []
        self._falling = self._steps()

    @functools.cached_property
    def _least(self) -> Order:
        """The order that runs all again that may."""
        return self._all.planner.order(self._ways(self._facts.costly & self._facts.may_rerun))

    @functools.cached_property
    def last(self) -> Found:
        """The plan of that order, which few rows are asked for."""
        return self._all.found(self._least)

    @property
    def division(self) -> Division:
        """What its plans have in common."""
        return self.cuts, self.early

    @property
    def all(self) -> list[Found]:
        """All plans but those between two steps."""
        self._found += self._falling
        return [*self._found, self.last]

    @property
    def lowest(self) -> Found:
        """The plan of the lowest peak."""
        return min(self.all, key=lambda each: (self._all.takes(each), each.ms))

    def at(self, place: int) -> Found | None:
        """The plan so many steps from all that is costly kept; None beyond the last one."""
        while place >= len(self._found):
            if (following := next(self._falling, None)) is None:
                return self.last if place == len(self._found) else None
            self._found.append(following)
        return self._found[place]

    def _ways(self, rerun: frozenset[int]) -> Ways:
        return Ways(self.cuts, rerun, self.early)

    def _look(self, rerun: frozenset[int]) -> Found:
        return self._all.look(self._ways(rerun))

    def _steps(self) -> Iterator[Found]:
        now = self._look(frozenset())
        yield now
        step = max((now.peaks.saved - self._all.kept(self._least)) // _STEPS, 1)
        raising: set[int] = set()
        while more := self._next(now, step, raising) or self._next(now, step):
            found = self._look(now.order.ways.rerun | more)
            above = self._at_peak(found, more - raising) if self._all.takes(found) > self._all.takes(now) else set()
            if above:
                raising |= above
            else:
                now = found
                yield now

    def _at_peak(self, found: Found, nodes: Iterable[int]) -> set[int]:
        """Those of the nodes that run again for a region whose copies live at the peak."""
        ways = found.order.ways
        bounds = [ways.reach(number) for number in found.peaks.highest.regions]
        return {i for i in nodes if any(start <= self._facts.place[i] < end for start, end in bounds)}

    def _next(self, now: Found, step: int, without: Set[int] = frozenset()) -> frozenset[int]:
        """The costly nodes that give ``step`` bytes of what is kept at the peak for the least time.

        Those come last of whose values as many bytes would be kept instead, and those that would run again while the
        most bytes live.
        """
        facts, order, mark = self._facts, now.order, now.peaks.highest
        worth = []
        for number, kept in enumerate(order.kept):
            for node in kept:
                if mark.living.isdisjoint(facts.holds[node]):
                    continue
                missing, instead = self._made_of(node, order, number)
                if missing and without.isdisjoint(missing):
                    gain = facts.sizes[node] - sum(facts.sizes[i] for i in instead)
                    price = sum(facts.ms[i] for i in missing) / max(gain, 1)
                    worth.append((number in mark.regions, gain <= 0, price, node, gain, missing))
        chosen: set[int] = set()
        total = 0
        for *_, gain, missing in sorted(worth, key=lambda each: each[:4]):
            if total >= step:
                break
            chosen |= missing
            total += max(gain, 0)
        return frozenset(chosen)

    def _made_of(self, node: int, order: Order, number: int) -> tuple[set[int], set[int]]:
        """For a value not to be kept for a region: the costly nodes that would have to run again besides, and what
        would be kept instead, as it does not run again for that region."""
        facts, rerun, kept = self._facts, order.ways.rerun, order.kept[number]
        start, end = order.ways.reach(number)
        missing, instead = set[int](), set[int]()
        ahead, seen = [node], set[int]()
        while ahead:
            i = ahead.pop()
            if i in seen or i in facts.ready:
                continue
            seen.add(i)
            if i not in facts.may_rerun or not start <= facts.place[i] < end:
                instead |= {i} - order.saved
            elif i in facts.costly and i not in rerun:
                missing.add(i)
            elif i == node or i not in kept:
                ahead += facts.inputs[i]
        return missing, instead

    def between(self, place: int, room: int, own: int) -> "_Between":
        """The plan at a place, where it fits, with some kept of what its step gave."""
        best = self.last if place == len(self._found) else self._found[place]
        before = self._found[place - 1].order.ways.rerun if place else best.order.ways.rerun
        given = sorted(best.order.ways.rerun - before, key=lambda node: (-self._facts.ms[node], node))
        found = _Between(best, _halves(given), self._look, lambda each: self._all.fits(each, room, own))
        for _ in range(_TRIES):
            found.go_on()
        return found


@dataclass
class _Between:
    """The ``best`` plan between two steps, with as much kept as there is room for of what the second one gave.

    All of that does not fit; so each half is tried, and the halves of what does not fit either: those ``ahead``.
    """

    best: Found
    ahead: list[list[int]]
    look: Callable[[frozenset[int]], Found]
    fits: Callable[[Found], bool]

    def go_on(self) -> None:
        """Try to keep the next of them."""
        if not self.ahead:
            return
        some = self.ahead.pop()
        tried = self.look(self.best.order.ways.rerun.difference(some))
        if self.fits(tried) and tried.ms <= self.best.ms:
            self.best = tried
        else:
            self.ahead += _halves(some)


def _halves(nodes: list[int]) -> list[list[int]]:
    """The second and the first half; none of a single node."""
    middle = len(nodes) // 2
    return [nodes[middle:], nodes[:middle]] if middle else []
