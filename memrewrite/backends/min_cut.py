"""The fewest bytes to keep so that everything needed can be made again: a minimum cut, nearest to what is needed.

Each value is an edge from where it is made to where it is there. As much as can be flows through these, from what
cannot be made again to what is needed, by Dinic's algorithm. The minimum cut nearest to the sink is the same for every
such flow.
"""

from collections.abc import Callable, Iterable, Sequence

INFINITE = 1 << 60
_SOURCE, _SINK = 0, 1

Shape = tuple[tuple[tuple[int, bool, tuple[int, ...]], ...], tuple[int, ...]]
"""Of each value the price, whether it can be made, and the numbers of what it is made of; the numbers of the needed."""


def cheapest_cut(
    needed: Iterable[int],
    inputs: Sequence[Sequence[int]],
    prices: Sequence[int],
    makes: Callable[[int], bool],
    known: dict[Shape, tuple[int, ...]],
) -> set[int]:
    """The values to keep, of least ``prices`` in all, so that the ``needed`` ones can be made of them.

    A value that ``makes`` is false of cannot be made again and is kept if anything takes it, unless it is there anyway
    and its price 0; one of ``INFINITE`` price cannot be kept. Of cuts of one price the one is taken that leaves least
    to be made. Equal layers give equal shapes, and what was cut before is ``known``.
    """
    wanted = sorted(needed)
    found: dict[int, tuple[int, bool, Sequence[int]]] = {}
    ahead = [*wanted]
    while ahead:
        value = ahead.pop()
        if value in found or not (cost := prices[value]):
            continue
        made = makes(value)
        found[value] = cost, made, inputs[value] if made else ()
        ahead += found[value][2]
    number = {value: place for place, value in enumerate(found)}
    values = tuple(
        (cost, made, tuple(number[each] for each in read if each in number)) for cost, made, read in found.values()
    )
    shape = values, tuple(number[value] for value in wanted if value in number)
    if (kept := known.get(shape)) is None:
        kept = known[shape] = _cut(shape)
    order = [*found]
    return {order[place] for place in kept}


def _cut(shape: Shape) -> tuple[int, ...]:
    """The numbers of the values to keep."""
    network, (values, wanted) = _Network(), shape
    ends: list[tuple[int, int]] = []  # the places where a value is made and where it is there
    for cost, made, _ in values:
        start = network.place() if made else _SOURCE
        free = made and cost >= INFINITE
        ends.append((start, start if free else network.place()))
        if not free:
            network.join(*ends[-1], cost)
    for (_, _, read), (start, _) in zip(values, ends, strict=True):
        for each in read:
            network.join(ends[each][1], start, INFINITE)
    for each in wanted:
        network.join(ends[each][1], _SINK, INFINITE)
    far = network.fill()
    return tuple(number for number, (start, end) in enumerate(ends) if far[end] >= 0 > far[start])


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
            if far[place] == far[_SOURCE]:  # what is further is on no shortest path
                break
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
