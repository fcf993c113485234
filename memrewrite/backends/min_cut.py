"""The fewest bytes to keep so that everything needed can be made again: a minimum cut, nearest to what is needed."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

INFINITE = 1 << 60


def cheapest_cut(
    needed: Iterable[int],
    inputs: Callable[[int], Sequence[int]],
    price: Callable[[int], int],
    makes: Callable[[int], bool],
) -> set[int]:
    """The values to keep, of least ``price`` in all, so that the ``needed`` ones can be made of them.

    A value that ``makes`` is false of cannot be made again and is kept if anything takes it; one of ``INFINITE`` price
    cannot be kept. Of cuts of one price the one is taken that leaves least to be made.
    """
    network = _Network()
    seen: set[int] = set()
    ahead = list(dict.fromkeys(needed))
    for value in ahead:
        network.edge((value, 1), _SINK, INFINITE)
    while ahead:
        value = ahead.pop()
        if value in seen:
            continue
        seen.add(value)
        network.edge((value, 0), (value, 1), price(value))
        if not makes(value):
            network.edge(_SOURCE, (value, 0), INFINITE)
            continue
        for source in inputs(value):
            network.edge((source, 1), (value, 0), INFINITE)
            ahead.append(source)
    reaches = network.reaching_sink()
    return {value for value in seen if (value, 1) in reaches and (value, 0) not in reaches}


_Place = tuple[int, int]
_SOURCE, _SINK = (-1, 0), (-1, 1)


class _Network:
    """Capacities between places, by Dinic's algorithm."""

    def __init__(self) -> None:
        self._number: dict[_Place, int] = {_SOURCE: 0, _SINK: 1}
        self._to: list[int] = []
        self._left: list[int] = []
        self._from: list[list[int]] = [[], []]

    def edge(self, a: _Place, b: _Place, capacity: int) -> None:
        """Let up to ``capacity`` flow from ``a`` to ``b``."""
        for start, end, room in ((a, b, capacity), (b, a, 0)):
            self._from[self._at(start)].append(len(self._to))
            self._to.append(self._at(end))
            self._left.append(room)

    def reaching_sink(self) -> set[_Place]:
        """The places from which the sink can still be reached once as much flows as can."""
        while (levels := self._levels())[1] >= 0:
            self._augment(levels)
        found, ahead = {1}, [1]
        while ahead:
            for edge in self._from[ahead.pop()]:
                start = self._to[edge]
                if self._left[edge ^ 1] and start not in found:
                    found.add(start)
                    ahead.append(start)
        return {place for place, number in self._number.items() if number in found}

    def _at(self, place: _Place) -> int:
        if place not in self._number:
            self._number[place] = len(self._from)
            self._from.append([])
        return self._number[place]

    def _levels(self) -> list[int]:
        levels = [-1] * len(self._from)
        levels[0] = 0
        ahead = deque([0])
        while ahead:
            place = ahead.popleft()
            for edge in self._from[place]:
                if self._left[edge] and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[place] + 1
                    ahead.append(self._to[edge])
        return levels

    def _augment(self, levels: list[int]) -> None:
        """Send all that can flow along shortest ways."""
        following = [0] * len(self._from)
        path: list[int] = []
        place = 0
        while True:
            if place == 1:
                sent = min(self._left[edge] for edge in path)
                for edge in path:
                    self._left[edge] -= sent
                    self._left[edge ^ 1] += sent
                first = next(i for i, edge in enumerate(path) if not self._left[edge])
                place = self._to[path[first] ^ 1]
                del path[first:]
                continue
            edges = self._from[place]
            while following[place] < len(edges):
                edge = edges[following[place]]
                if self._left[edge] and levels[self._to[edge]] == levels[place] + 1:
                    break
                following[place] += 1
            else:
                if not path:
                    return
                place = self._to[path.pop() ^ 1]
                following[place] += 1
                continue
            path.append(edge)
            place = self._to[edge]
