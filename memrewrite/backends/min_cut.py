"""The fewest bytes to keep so that everything needed can be made again: a minimum cut, nearest to what is needed.

Each value is an edge from where it is made to where it is there. As much as can be flows through these, from what
cannot be made again to what is needed, by Dinic's algorithm. The minimum cut nearest to the sink is the same for every
such flow.
"""

from collections.abc import Callable, Iterable, Sequence

INFINITE = 1 << 60
_SOURCE, _SINK = 0, 1


def cheapest_cut(
    needed: Iterable[int],
    inputs: Callable[[int], Sequence[int]],
    price: Callable[[int], int],
    makes: Callable[[int], bool],
) -> set[int]:
    """The values to keep, of least ``price`` in all, so that the ``needed`` ones can be made of them.

    A value that ``makes`` is false of cannot be made again and is kept if anything takes it, unless it is there anyway
    and its price 0; one of ``INFINITE`` price cannot be kept. Of cuts of one price the one is taken that leaves least
    to be made.
    """
    network = _Network()
    wanted = list(needed)
    sources: dict[int, Sequence[int]] = {}
    ends: dict[int, tuple[int, int]] = {}  # the places where a value is made and where it is there
    ahead = [*wanted]
    while ahead:
        value = ahead.pop()
        if value in ends or not (cost := price(value)):
            continue
        made = makes(value)
        sources[value] = inputs(value) if made else ()
        start = network.place() if made else _SOURCE
        if made and cost >= INFINITE:
            ends[value] = start, start
        else:
            ends[value] = start, network.place()
            network.join(*ends[value], cost)
        ahead += sources[value]
    for value, read in sources.items():
        for each in read:
            if each in ends:
                network.join(ends[each][1], ends[value][0], INFINITE)
    for value in wanted:
        if value in ends:
            network.join(ends[value][1], _SINK, INFINITE)
    far = network.fill()
    return {value for value, (start, end) in ends.items() if far[end] >= 0 > far[start]}


class _Network:
    """Places, and edges between them with the room that is left in each; an odd edge is the one before it backwards."""

    def __init__(self) -> None:
        self._to: list[int] = []
        self._room: list[int] = []
        self._edges: list[list[int]] = [[], []]

    def place(self) -> int:
        """A new one, after the source and the sink."""
        self._edges.append([])
        return len(self._edges) - 1

    def join(self, start: int, end: int, room: int) -> None:
        """An edge from ``start`` to ``end``."""
        self._edges[start].append(len(self._to))
        self._edges[end].append(len(self._to) + 1)
        self._to += (end, start)
        self._room += (room, 0)

    def fill(self) -> list[int]:
        """Let as much flow as can; returns how far each place is from the sink by what room is left, -1: cut off."""
        while (far := self._far())[_SOURCE] >= 0:
            self._block(far)
        return far

    def _far(self) -> list[int]:
        to, room, edges = self._to, self._room, self._edges
        far = [-1] * len(edges)
        far[_SINK] = 0
        ahead = [_SINK]
        for place in ahead:
            for edge in edges[place]:
                before = to[edge]
                if far[before] < 0 and room[edge ^ 1]:
                    far[before] = far[place] + 1
                    ahead.append(before)
        return far

    def _block(self, far: list[int]) -> None:
        """Fill the shortest paths."""
        to, room, edges = self._to, self._room, self._edges
        tried = [0] * len(edges)  # of each place's edges, those that lead no further
        path: list[int] = []
        place = _SOURCE
        while place != _SOURCE or tried[place] < len(edges[place]):
            if place == _SINK:
                flow = min([room[edge] for edge in path])
                for edge in path:
                    room[edge] -= flow
                    room[edge ^ 1] += flow
                full = next(i for i, edge in enumerate(path) if not room[edge])
                place = to[path[full] ^ 1]
                del path[full:]
            elif tried[place] == len(edges[place]):
                place = to[path.pop() ^ 1]
                tried[place] += 1
            else:
                edge = edges[place][tried[place]]
                if room[edge] and far[to[edge]] == far[place] - 1:
                    path.append(edge)
                    place = to[edge]
                else:
                    tried[place] += 1
