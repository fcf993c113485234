"""How many bytes live at each node of forward and of a planned backward, as Inductor's kernels make and read them.

A value that is only read by kernels that make it themselves is never written: what it is made of lives until it is
read. A kernel may write over what it is the last to read, as Inductor lets elementwise ones do, also over what forward
handed to backward.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from memrewrite.backends.facts import Facts
from memrewrite.backends.plan import Order
from memrewrite.backends.runs import Runs
from memrewrite.backends.stretches import Event, Inside, Key, Placed, Reads, Recent, Size, Stretch

_END = 1 << 40  # after any run

_Span = tuple[Key, int, int]  # a value that is not within a stretch: from where to where it lives


@dataclass(frozen=True)
class Watermark:
    """The peak in bytes, what lives there of what runs once, and the regions whose copies do."""

    peak: int
    living: frozenset[int]
    regions: frozenset[int]


@dataclass(frozen=True)
class Peaks:
    """The peaks of forward and backward in bytes, besides what lives all the time; ``saved`` between the two."""

    forward: Watermark
    backward: Watermark
    saved: int

    @property
    def highest(self) -> Watermark:
        """The higher one; forward's of two that are equal."""
        return max(self.forward, self.backward, key=lambda mark: mark.peak)

    @property
    def peak(self) -> int:
        """That in bytes."""
        return self.highest.peak


class Live:
    """Tells the peaks of orders of one joint graph; what two orders have in common is simulated once."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self._runs = facts, Runs(facts)
        self._tangents = frozenset(s for t in facts.tangents for s in facts.holds[t])

    def peaks(self, order: Order) -> Peaks:
        """The peaks of an order; autograd lets go of what backward was given only when that is through."""
        saved = self._saved(order)
        forward = self._watermark(self._runs.forward(order.saved, saved), frozenset(), frozenset())
        forward = replace(forward, peak=forward.peak + self.facts.held)
        backward, kept = self._watermark(*self._backward(order, saved)), self._bytes(saved)
        if self.facts.outside and kept + self.facts.outside > backward.peak:  # where a loss begins it
            backward = Watermark(kept + self.facts.outside, saved, frozenset())
        return Peaks(forward, backward, kept)

    def kept(self, order: Order) -> int:
        """The bytes that an order keeps, which takes no look at what lives besides."""
        return self._bytes(self._saved(order))

    def left(self, order: Order, room: int) -> tuple[int, int]:
        """Of so many bytes those that what lives all through forward, and all through backward, leaves."""
        through = (self._runs.outputs | self._tangents) - self._saved(order)
        return room - self.facts.held, room - self._bytes(through)

    def crests(self, order: Order) -> list[int]:
        """Where the most bytes live in each part of backward, as a place in its order."""
        course = Course(*self._backward(order, self._saved(order)), self._runs.size)
        ends = [*accumulate(len(part.steps) for part in order.parts)]
        best: dict[int, tuple[int, int]] = {}
        for (height, at), start, stretch in zip(course.heights(), course.starts, course.stretches, strict=False):
            if stretch.runs:
                part = bisect_right(ends, start)
                best[part] = max(best.get(part, (height, start + at)), (height, start + at))
        return [place for _, place in best.values()]

    def _saved(self, order: Order) -> frozenset[Key]:
        return frozenset(s for node in order.saved for s in self.facts.holds[node])

    def _bytes(self, keys: Iterable[Key]) -> int:
        return sum(map(self._runs.size, keys))

    def _backward(self, order: Order, saved: frozenset[Key]) -> tuple[list[Stretch], frozenset[Key], frozenset[Key]]:
        """What backward runs, what it is given, and what lives until it is through."""
        stretches, last = self._runs.backward(order)
        held = self._runs.outputs | self._tangents
        return stretches, saved | held, last | held

    def _watermark(self, stretches: list[Stretch], given: frozenset[Key], ends: frozenset[Key]) -> Watermark:
        peak, living = watermark(stretches, given, ends, self._runs.size)
        pairs = [divmod(key, self._runs.count) for key in living]
        once = frozenset(storage for region, storage in pairs if not region)
        return Watermark(peak, once, frozenset(region - 1 for region, _ in pairs if region))


def watermark(
    stretches: list[Stretch], given: frozenset[Key], ends: frozenset[Key], size: Size
) -> tuple[int, list[Key]]:
    """The most bytes that live, and what then lives: ``given`` values are there at first, and until the end those of
    them that ``ends`` names, and those that stretches do."""
    course = Course(stretches, given, ends, size)
    best = sum(map(size, given))
    where: tuple[int, int] | None = None
    for number, (height, at) in enumerate(course.heights()):
        if height > best:
            best, where = height, (number, at)
    if where is None:
        return best, sorted(given)
    number, at = where
    place = course.starts[number] + at
    living = [key for key, born, last in course.spans if born <= place <= last]
    return best, [*living, *course.placed[number].living(at)]


class Course:
    """Stretches one after the other, from ``starts`` on, with what lives beyond them; as in ``watermark``."""

    def __init__(self, stretches: list[Stretch], given: frozenset[Key], ends: frozenset[Key], size: Size) -> None:
        self.stretches, self.placed = stretches, _placed(stretches)
        self.starts = [0, *accumulate(stretch.length for stretch in stretches)]
        self.spans = _spans(self.placed, self.starts, given, ends)
        self._first = sum(map(size, given)) - sum(size(key) for key, _, last in self.spans if last < 0)

    def heights(self) -> Iterator[tuple[int, int]]:
        """For each stretch the most bytes that live in it, and where, counted from its beginning."""
        now = self._first
        for each, events in zip(self.placed, _events(self.spans, self.starts), strict=False):
            curve = each.curve(tuple(events))
            yield now + curve.highest, curve.at
            now += curve.rise


def _placed(stretches: list[Stretch]) -> list[Placed]:
    """What is known of each of these, one after the other."""
    makers: dict[Key, int] = {}
    for number, stretch in enumerate(stretches):
        makers |= dict.fromkeys(stretch.makes, number)
    later: list[dict[Key, Reads]] = [{} for _ in stretches]
    for stretch in stretches:
        for key, (more, inside) in stretch.outside.items():
            if (maker := makers.get(key)) is not None:
                count, so_far = later[maker].get(key, (0, True))
                later[maker][key] = count + more, so_far and inside
    found, start = [], 0
    sources: dict[Key, Inside] = {}
    recent: dict[Key, Recent] = {}
    for stretch, after in zip(stretches, later, strict=True):
        written = stretch.written(after, sources)
        sources |= written.sources
        each = written.placed(recent, start)
        for key, (born, read, made) in each.recent.items():
            recent[key] = born + start, read + start, made
        found.append(each)
        start += stretch.length
    return found


def _spans(placed: list[Placed], starts: list[int], given: frozenset[Key], ends: frozenset[Key]) -> list[_Span]:
    """What is given or lives beyond the stretch that makes it; what is given is born and, unread, dies at -1."""
    found: list[_Span] = []
    last: dict[Key, int] = {}
    for each, start in zip(placed[::-1], starts[-2::-1], strict=True):
        through = {key: max(last[value] for value in values) for key, values in each.through.items()}
        for key, born, here in each.open:
            at = max(start + here, last.get(key, -1), through.get(key, -1))
            found.append((key, start + born, _END if key in each.stretch.ends else at))
        for key, here in each.outside:
            at = max(start + here, through[key]) if key in through else start + here
            if last.get(key, -1) < at:
                last[key] = at
    found += [(key, -1, _END if key in ends else last.get(key, -1)) for key in sorted(given)]
    return found


def _events(spans: list[_Span], starts: list[int]) -> list[list[Event]]:
    """What begins and ends to live in each stretch."""
    found: list[list[Event]] = [[] for _ in starts]
    for key, born, last in spans:
        for at, begins in ((born, True), (last, False)):
            if 0 <= at < _END:
                number = bisect_right(starts, at) - 1
                found[number].append((at - starts[number], key, begins))
    return found
