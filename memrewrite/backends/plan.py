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
from memrewrite.backends.min_cut import INFINITE, cheapest_cut

_END = 1 << 30  # after any node
_BACK = 12  # nodes before its region that may run again for a region, where they cost little


@dataclass(frozen=True)
class Ways:
    """A choice: ``cuts`` are the nodes that regions begin at, ``rerun`` the costly nodes that may run again."""

    cuts: tuple[int, ...]
    rerun: frozenset[int]

    def region(self, number: int) -> tuple[int, int]:
        """The first node of a region, and the first after it."""
        bounds = (0, *self.cuts, _END)
        return bounds[number], bounds[number + 1]


@dataclass(frozen=True)
class Item:
    """A node in the order of backward: the region whose copy of it runs (None: it belongs to backward itself).

    ``reads`` are the positions in the order that make what it reads, and what is kept, as ``-1 - node``.
    """

    node: int
    region: int | None
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """What is kept, by region, and backward with what it makes again."""

    ways: Ways
    kept: tuple[frozenset[int], ...]
    items: tuple[Item, ...] = field(repr=False)

    @functools.cached_property
    def saved(self) -> frozenset[int]:
        """All that is kept."""
        return frozenset().union(*self.kept)

    def ms(self, facts: Facts) -> float:
        """What running again takes, in milliseconds."""
        return sum(facts.ms[item.node] for item in self.items if item.region is not None)


class Planner:
    """Turns choices into orders for one joint graph; what two choices have in common is computed once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.backward = [i for i, before in enumerate(facts.forward) if not before and i not in facts.tangents]
        self.latest = self._latest()
        self._cuts: dict[tuple[int, int, frozenset[int], frozenset[int]], frozenset[int]] = {}

    def order(self, ways: Ways) -> Order:
        """The order that a choice means."""
        regions = self._regions(ways.cuts)
        kept = tuple(self._kept(ways, number, nodes) for number, nodes in enumerate(regions))
        return Order(ways, kept, tuple(self._items(regions, frozenset().union(*kept))))

    def given(self, saved: frozenset[int]) -> Order:
        """The order where exactly these values are kept, and no value runs twice."""
        return Order(Ways((), frozenset()), (saved,), tuple(self._items([self.backward], saved)))

    def _latest(self) -> list[int]:
        """For each node of backward, in order, the latest value of forward that it or one after it reads."""
        found, latest = [], -1
        for node in reversed(self.backward):
            read = [i for i in self.facts.inputs[node] if self.facts.forward[i] and i not in self.facts.given]
            latest = max([latest, *(self.facts.place[i] for i in read)])
            found.append(latest)
        return found[::-1]

    def _regions(self, cuts: tuple[int, ...]) -> list[list[int]]:
        """The nodes of backward by region."""
        regions: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
        for node, latest in zip(self.backward, self.latest, strict=True):
            regions[bisect_right(cuts, latest)].append(node)
        return regions

    def _needed(self, number: int, nodes: Iterable[int]) -> frozenset[int]:
        """The values of forward that nodes of backward read, and in the last region those that are its results."""
        facts = self.facts
        read = {i for node in nodes for i in facts.inputs[node] if facts.forward[i]}
        if number == 0:
            read |= {i for i in facts.gradients if facts.forward[i]}
        return frozenset(i for i in read if i not in facts.given)

    def _kept(self, ways: Ways, number: int, nodes: list[int]) -> frozenset[int]:
        """What is kept for a region: the fewest bytes."""
        start, end = ways.region(number)
        needed = self._needed(number, nodes)
        if not needed:
            return frozenset()
        rerun = frozenset(i for i in ways.rerun if start <= self.facts.place[i] < end)
        key = (start, end, rerun, needed)
        if key not in self._cuts:
            self._cuts[key] = self._cut(start, end, rerun, needed)
        return self._cuts[key]

    def _cut(self, start: int, end: int, rerun: frozenset[int], needed: frozenset[int]) -> frozenset[int]:
        facts = self.facts

        def makes(node: int) -> bool:
            if node in facts.must_rerun:
                return True
            if node in facts.given or node in facts.symbols or node not in facts.may_rerun:
                return False
            if node in facts.views:
                return True
            if node in facts.costly:
                return node in rerun
            return start - _BACK <= facts.place[node] or not facts.inputs[node]  # a constant

        def price(node: int) -> int:
            if node in facts.given or node in facts.symbols:
                return 0
            moved = node in facts.views and facts.inputs[node][0] in facts.savable
            if node in facts.must_rerun or node not in facts.savable or moved:
                return INFINITE
            return facts.size(node) + 1

        found = cheapest_cut(needed, facts.inputs.__getitem__, price, makes)
        return frozenset(node for node in found if node not in facts.given)

    def _items(self, regions: list[list[int]], saved: frozenset[int]) -> Iterator[Item]:
        """Backward in its order, with what each region makes again before whoever first asks for it."""
        facts = self.facts
        there: dict[int, int] = {}  # where nodes of backward stand in the order
        copies: dict[tuple[int, int], int] = {}
        count = 0
        region_of = {node: number for number, nodes in enumerate(regions) for node in nodes}

        def places(node: int, region: int) -> tuple[int, ...]:
            return tuple(place(i, region) for i in facts.inputs[node])

        def place(i: int, region: int) -> int:
            if i in saved or i in facts.given or i in facts.symbols or i in facts.tangents:
                return -1 - i
            return there[i] if i in there else copies[i, region]

        def again(needed: Iterable[int], region: int) -> Iterator[Item]:
            nonlocal count
            missing: set[int] = set()
            ahead = list(needed)
            while ahead:
                i = ahead.pop()
                kept = i in saved or i in facts.given or i in facts.symbols
                if kept or i in missing or (i, region) in copies or not facts.forward[i]:
                    continue
                missing.add(i)
                ahead += facts.inputs[i]
            for i in sorted(missing):
                yield Item(i, region, places(i, region))
                copies[i, region] = count
                count += 1

        for node in self.backward:
            region = region_of[node]
            yield from again(facts.inputs[node], region)
            yield Item(node, None, places(node, region))
            there[node] = count
            count += 1
        yield from again((i for i in facts.gradients if facts.forward[i]), 0)
