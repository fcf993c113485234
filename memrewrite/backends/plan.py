"""What of forward is kept and where backward makes the rest again, and the order in which backward then runs.

Forward is divided into regions where few bytes cross, and each node of backward belongs to the region of the latest
value of forward that it or a later node reads. Backward makes again what it reads of a region when it first asks for
it, a copy for each region, so that nothing made again outlives its region, and a value may run again several times::

    forward    a = f(x)  b = g(a)  |  c = h(b)  d = k(c)          regions {a, b} and {c, d}; x and b are kept
    backward   c' = h(b)  gc = k'(g, c')  gb = h'(gc, b)  |  a' = f(x)  ga = g'(gb, a')  gx = f'(ga, x)
"""

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from memrewrite.backends.facts import Facts
from memrewrite.backends.min_cut import INFINITE, Shape, cheapest_cut

_END = 1 << 30  # after any node
_BACK = 12  # nodes before its region that may run again for a region, where they cost little

Division = tuple[tuple[int, ...], int]
"""Where forward is divided, and how many regions before its own one may begin to make things again."""


@dataclass(frozen=True)
class Ways:
    """A choice: ``cuts`` are the nodes that regions begin at, ``rerun`` the costly nodes that may run again.

    What a region makes again may begin ``early``, so many regions before it.
    """

    cuts: tuple[int, ...]
    rerun: frozenset[int]
    early: int = 0

    @property
    def division(self) -> Division:
        """What choices of one division have in common."""
        return self.cuts, self.early

    def region(self, number: int) -> tuple[int, int]:
        """The first node of a region, and the first after it."""
        bounds = (0, *self.cuts, _END)
        return bounds[number], bounds[number + 1]

    def reach(self, number: int) -> tuple[int, int]:
        """The first node that may run again for a region, and the first after it."""
        return self.region(max(number - self.early, 0))[0], self.region(number)[1]


@dataclass(frozen=True)
class Item:
    """A node in the order of backward: the region whose copy of it runs (None: it belongs to backward itself).

    ``reads`` are the positions in the order that make what it reads, and what is kept, as ``-1 - node``.
    """

    node: int
    region: int | None
    reads: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """The nodes of backward that belong to a region, each after what the region makes again for it.

    ``steps`` are nodes, and whether it is a copy of the region's that runs.
    """

    region: int
    steps: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, eq=False)
class Order:
    """What is kept, by region, and backward with what it makes again."""

    facts: Facts = field(repr=False)
    ways: Ways
    kept: tuple[frozenset[int], ...]
    parts: tuple[Part, ...] = field(repr=False)

    @functools.cached_property
    def saved(self) -> frozenset[int]:
        """All that is kept."""
        return frozenset().union(*self.kept)

    @functools.cached_property
    def items(self) -> tuple[Item, ...]:
        """Backward in its order."""
        return tuple(self._items())

    def _items(self) -> Iterator[Item]:
        facts, there = self.facts, dict[int, int]()  # where nodes stand in the order, copies as of the present region
        ready = self.saved | facts.ready | {*facts.tangents}
        steps = ((part.region, *step) for part in self.parts for step in part.steps)
        for count, (region, node, copied) in enumerate(steps):
            reads = tuple(-1 - i if i in ready else there[i] for i in facts.inputs[node])
            yield Item(node, region if copied else None, reads)
            there[node] = count

    @property
    def length(self) -> int:
        """How many nodes run in backward."""
        return sum(len(part.steps) for part in self.parts)

    @functools.cached_property
    def ms(self) -> float:
        """What running again takes, in milliseconds."""
        ms = self.facts.ms
        return sum(ms[node] for part in self.parts for node, copied in part.steps if copied)


class Planner:
    """Turns choices into orders for one joint graph; what two choices have in common is computed once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.backward = [i for i, before in enumerate(facts.forward) if not before and i not in facts.tangents]
        self.latest = self._latest()
        self._reads = {
            node: frozenset(i for i in facts.inputs[node] if facts.forward[i] and i not in facts.ready)
            for node in self.backward
        }
        self._prices = [self._price(node) for node in range(len(facts.inputs))]
        self._cuts: dict[tuple[int, int, frozenset[int], frozenset[int]], frozenset[int]] = {}
        self._shapes: dict[Shape, tuple[int, ...]] = {}
        self._divided: dict[tuple[int, ...], list[_Region]] = {}

    def order(self, ways: Ways) -> Order:
        """The order that a choice means."""
        if ways.cuts not in self._divided:
            self._divided[ways.cuts] = self._regions(ways.cuts)
        regions = self._divided[ways.cuts]
        kept = tuple(self._kept(ways, region) for region in regions)
        return self._ordered(ways, regions, kept)

    def given(self, saved: frozenset[int]) -> Order:
        """The order where exactly these values are kept, and no value runs twice."""
        return self._ordered(Ways((), frozenset()), self._regions(()), (saved,))

    def _ordered(self, ways: Ways, regions: list["_Region"], kept: tuple[frozenset[int], ...]) -> Order:
        saved = frozenset().union(*kept)
        pairs = zip(regions[::-1], kept[::-1], strict=True)
        return Order(self.facts, ways, kept, tuple(self._part(region, mine, saved) for region, mine in pairs))

    def _latest(self) -> list[int]:
        """For each node of backward, in order, the latest value of forward that it or one after it reads."""
        found, latest = [], -1
        for node in reversed(self.backward):
            read = [i for i in self.facts.inputs[node] if self.facts.forward[i] and i not in self.facts.given]
            latest = max([latest, *(self.facts.place[i] for i in read)])
            found.append(latest)
        return found[::-1]

    def _regions(self, cuts: tuple[int, ...]) -> list["_Region"]:
        """The nodes of backward by region."""
        nodes: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
        for node, latest in zip(self.backward, self.latest, strict=True):
            nodes[bisect_right(cuts, latest)].append(node)
        return [
            _Region(number, tuple((self._reads[node], (node, False)) for node in each), self._needed(number, each))
            for number, each in enumerate(nodes)
        ]

    def _needed(self, number: int, nodes: Iterable[int]) -> frozenset[int]:
        """The values of forward that nodes of backward read, and in the last region those that are its results."""
        facts = self.facts
        read = {i for node in nodes for i in facts.inputs[node] if facts.forward[i]}
        if number == 0:
            read |= {i for i in facts.gradients if facts.forward[i]}
        return frozenset(i for i in read if i not in facts.given)

    def _kept(self, ways: Ways, region: "_Region") -> frozenset[int]:
        """What is kept for a region: the fewest bytes."""
        start, end = ways.reach(region.number)
        if not region.needed:
            return frozenset()
        rerun = frozenset(i for i in ways.rerun if start <= self.facts.place[i] < end)
        key = (start, end, rerun, region.needed)
        if key not in self._cuts:
            self._cuts[key] = self._cut(start, end, rerun, region.needed)
        return self._cuts[key]

    def _price(self, node: int) -> int:
        """What it costs to keep a value, as ``cheapest_cut`` has it."""
        facts = self.facts
        if node in facts.ready:
            return 0
        moved = node in facts.views and facts.inputs[node][0] in facts.savable
        if node in facts.must_rerun or node not in facts.savable or moved:
            return INFINITE
        return facts.sizes[node] + 1

    def _cut(self, start: int, end: int, rerun: frozenset[int], needed: frozenset[int]) -> frozenset[int]:
        facts = self.facts

        def makes(node: int) -> bool:
            if node in facts.must_rerun:
                return True
            if node in facts.ready or node not in facts.may_rerun:
                return False
            if node in facts.views:
                return True
            if node in facts.costly:
                return node in rerun
            return start - _BACK <= facts.place[node] or not facts.inputs[node]  # a constant

        found = cheapest_cut(needed, facts.inputs, self._prices, makes, self._shapes)
        return frozenset(node for node in found if node not in facts.given)

    def _part(self, region: "_Region", kept: frozenset[int], saved: frozenset[int]) -> Part:
        """A region's part of backward; it is the same where as much of what it is made of is kept."""
        if kept not in region.made_of:
            region.made_of[kept] = frozenset(self._again(region.needed, kept, set()))
        known = saved & region.made_of[kept] | kept
        if known not in region.parts:
            region.parts[known] = Part(region.number, tuple(self._steps(region, known)))
        return region.parts[known]

    def _steps(self, region: "_Region", saved: frozenset[int]) -> list[tuple[int, bool]]:
        """The nodes of a region in their order, with what it makes again before whoever first asks for it."""
        found: list[tuple[int, bool]] = []
        there = {*saved}
        for reads, step in region.steps:
            if not reads <= there:
                found += self._made_again(reads, there)
            found.append(step)
        if region.number == 0:
            found += self._made_again(self.facts.gradients, there)
        return found

    def _made_again(self, needed: Iterable[int], there: set[int]) -> list[tuple[int, bool]]:
        """The steps that have to run, in order, so that these are ``there``; then they are."""
        missing = sorted(self._again(needed, frozenset(), there))
        there.update(missing)
        return [(i, True) for i in missing]

    def _again(self, needed: Iterable[int], saved: frozenset[int], made: set[int]) -> set[int]:
        """The values of forward that these are made of, from what is ``saved`` on, which is among them."""
        facts, ready = self.facts, self.facts.ready
        found: set[int] = set()
        ahead = list(needed)
        while ahead:
            i = ahead.pop()
            if i in found or i in ready or i in made or not facts.forward[i]:
                continue
            found.add(i)
            if i not in saved:
                ahead += facts.inputs[i]
        return found


@dataclass(eq=False)
class _Region:
    """The nodes of backward in a region, as steps with the values of forward that they read, and what is known of it.

    It needs all that they read; ``made_of`` has for what may be kept of that all that the rest is made of, and
    ``parts`` what then runs.
    """

    number: int
    steps: tuple[tuple[frozenset[int], tuple[int, bool]], ...]
    needed: frozenset[int]
    made_of: dict[frozenset[int], frozenset[int]] = field(default_factory=dict)
    parts: dict[frozenset[int], Part] = field(default_factory=dict)
