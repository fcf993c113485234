"""Plans of less and less memory, and the cheapest of them within a number of bytes.

For each of several divisions of forward into regions all costly nodes are kept at first. Then, step by step, those may
run again that free the most bytes of what lives at the peak for the time they take. The steps do not depend on the
budget, so a larger one never gives a dearer plan; between two steps nodes are tried one by one.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from memrewrite.backends.facts import Facts
from memrewrite.backends.live import Peaks, peaks
from memrewrite.backends.plan import Order, Planner, Ways

_REGIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_LIGHT = 1.25  # of the bytes that cross at the lightest quarter of the places where few do
_STEPS = 16  # from all costly nodes kept to none
_TRIES = 24  # nodes that are tried one by one between two steps
_DEEP = 24  # nodes between what is kept and the costly one it is made of, at most
_WINDOW = 0.5  # of a region's bytes: around where it would end, a lighter place is looked for


@dataclass(frozen=True)
class Found:
    """A plan, its peaks in bytes besides what lives all the time, and the milliseconds it takes to run nodes again."""

    order: Order
    peaks: Peaks
    ms: float

    @property
    def rank(self) -> tuple[float, int, int]:
        """The cheaper and then the lower comes first."""
        return (self.ms, self.peaks.peak, len(self.order.items))


class Frontier:
    """The plans for one joint graph, made once and asked for any number of bytes.

    Graphs that come ``later`` are taken to keep so many times what this one keeps, while it is kept.
    """

    def __init__(self, facts: Facts, later: float = 0.0) -> None:
        self.facts, self.later = facts, later
        self.planner = Planner(facts)
        self.rows = [_Row(self, cuts) for cuts in divisions(facts)]

    def lowest(self) -> Found:
        """The plan of the lowest peak."""
        found = (row.lowest for row in self.rows)
        return min(found, key=lambda each: (self.takes(each), each.ms))

    def least(self, room: int) -> Found | None:
        """The plan that keeps least for backward of those whose own peak is at most ``room`` bytes."""
        found = (each for row in self.rows for each in row.all if each.peaks.peak <= room)
        return min(found, key=lambda each: (each.peaks.saved, each.peaks.peak, each.ms), default=None)

    def takes(self, found: Found) -> int:
        """The peak in bytes of a plan, with what later graphs keep."""
        return found.peaks.peak + int(self.later * found.peaks.saved)

    def fits(self, found: Found, room: int, own: int = sys.maxsize) -> bool:
        """Whether a plan takes at most ``room`` bytes, and at most ``own`` without what later graphs keep."""
        return self.takes(found) <= room and found.peaks.peak <= own

    def within(self, room: int, own: int = sys.maxsize) -> Found | None:
        """The cheapest plan that ``fits``; None where there is none."""
        fitting = [each for row in self.rows if (each := row.within(room, own)) is not None]
        return min(fitting, key=lambda each: each.rank) if fitting else None

    def look(self, ways: Ways) -> Found:
        """A choice with its peaks and cost."""
        order = self.planner.order(ways)
        return Found(order, peaks(self.facts, order), order.ms(self.facts))


class _Row:
    """The plans of one division, from all that is costly kept to as little as can be, made as they are asked for."""

    def __init__(self, frontier: Frontier, cuts: tuple[int, ...]) -> None:
        self._all, self._facts, self._cuts = frontier, frontier.facts, cuts
        self._found: list[Found] = []
        self._falling = self._steps()
        self.last = frontier.look(Ways(cuts, frontier.facts.costly & frontier.facts.may_rerun))

    @property
    def all(self) -> list[Found]:
        """All plans but those between two steps."""
        self._found += self._falling
        return [*self._found, self.last]

    @property
    def lowest(self) -> Found:
        """The plan of the lowest peak."""
        return min(self.all, key=lambda each: (self._all.takes(each), each.ms))

    def within(self, room: int, own: int) -> Found | None:
        """The cheapest that fits, with as much kept as there is room for of what its last step gave."""
        place = 0
        while True:
            if place == len(self._found):
                if (following := next(self._falling, None)) is None:
                    return self.last if self._all.fits(self.last, room, own) else None
                self._found.append(following)
            if self._all.fits(self._found[place], room, own):
                return self._between(place, room, own)
            place += 1

    def _steps(self) -> Iterator[Found]:
        now = self._all.look(Ways(self._cuts, frozenset()))
        yield now
        step = max((now.peaks.saved - self.last.peaks.saved) // _STEPS, 1)
        while more := self._next(now, step):
            now = self._all.look(Ways(self._cuts, now.order.ways.rerun | more))
            yield now

    def _next(self, now: Found, step: int) -> frozenset[int]:
        """The costly nodes that give ``step`` bytes of what is kept at the peak for the least time.

        Those that would run again while the most bytes live come last.
        """
        facts, order = self._facts, now.order
        mark = max(now.peaks.forward, now.peaks.backward, key=lambda mark: mark.peak)
        living = {storage for storage, copy in mark.living if copy == -1}
        again = {copy for _, copy in mark.living}
        worth = []
        for number, kept in enumerate(order.kept):
            start, end = order.ways.region(number)
            for node in kept:
                if not living & {*facts.holds[node]}:
                    continue
                for source in self._sources(node):
                    if start <= facts.place[source] < end and source not in order.ways.rerun:
                        price = facts.ms[source] / max(facts.size(node), 1)
                        worth.append((number in again, price, source, facts.size(node)))
        chosen: set[int] = set()
        total = 0
        for _, _, source, size in sorted(worth):
            if total >= step:
                break
            if source not in chosen:
                chosen.add(source)
                total += size
        return frozenset(chosen)

    def _sources(self, node: int) -> list[int]:
        """The costly nodes that a kept value is made of, through what costs nothing."""
        facts = self._facts
        found, ahead, seen = [], [node], set[int]()
        while ahead:
            i = ahead.pop()
            if i in seen or i in facts.given or i not in facts.may_rerun:
                continue
            seen.add(i)
            if i in facts.costly:
                found.append(i)
            elif len(seen) <= _DEEP:
                ahead += facts.inputs[i]
        return found

    def _between(self, place: int, room: int, own: int) -> Found:
        best = self._found[place]
        if not place:
            return best
        before = self._found[place - 1].order.ways.rerun
        given = sorted(best.order.ways.rerun - before, key=lambda node: (-self._facts.ms[node], node))
        for node in given[:_TRIES]:
            tried = self._all.look(Ways(self._cuts, best.order.ways.rerun - {node}))
            if self._all.fits(tried, room, own) and tried.ms <= best.ms:
                best = tried
        return best


def divisions(facts: Facts) -> list[tuple[int, ...]]:
    """The nodes that regions begin at, for several numbers of regions, each where few bytes cross.

    Then those that begin wherever much fewer bytes cross than on either side, as between the halves of a transformer's
    blocks, and every other of these.
    """
    across = _crossing(facts)
    made = list(accumulate(sum(facts.bytes[s] for s in facts.makes[i]) * facts.forward[i] for i in range(len(across))))
    total = made[-1] if made else 0
    places = [i for i in range(1, len(across)) if _may_cut(facts, i)]
    found: list[tuple[int, ...]] = []
    for count in _REGIONS:
        cuts = []
        for number in range(1, count):
            low, high = ((number + shift) * total / count for shift in (-_WINDOW, _WINDOW))
            inside = [i for i in places if low < made[i - 1] <= high]
            if inside:
                cuts.append(min(inside, key=lambda i: (across[i], i)))
        found.append(tuple(sorted({*cuts})))
    light = _light(places, across)
    return [*dict.fromkeys([*found, light, light[::2], light[1::2]])]


def _light(places: list[int], across: list[int]) -> tuple[int, ...]:
    """The lightest of the places where so few bytes cross that on either side twice as many do before it is fewer."""
    from scipy.signal import find_peaks

    _, told = find_peaks([-across[i] for i in places], prominence=0, plateau_size=1)
    firsts = [places[each] for each in told["left_edges"]]
    deep = [i for i, rise in zip(firsts, told["prominences"], strict=True) if rise >= across[i]]
    least = sorted(across[i] for i in deep)[len(deep) // 4] if deep else 0
    return tuple(i for i in deep if across[i] <= _LIGHT * least)


def _may_cut(facts: Facts, node: int) -> bool:
    return facts.place[node] == node and node not in facts.given and node not in facts.views


def _crossing(facts: Facts) -> list[int]:
    """For each node, the bytes made before it that it or a later node of forward reads."""
    last: dict[int, int] = {}
    born: dict[int, int] = {}
    for node, place in enumerate(facts.place):
        if place != node or not facts.forward[node]:
            continue
        for storage in facts.makes[node]:
            born[storage] = node
        for source in facts.inputs[node]:
            last |= dict.fromkeys(facts.holds[source], node)
    steps = [0] * (len(facts.nodes) + 2)
    for storage, node in born.items():
        if storage in last:
            steps[node + 1] += facts.bytes[storage]
            steps[last[storage] + 1] -= facts.bytes[storage]
    return list(accumulate(steps))[: len(facts.nodes)]
