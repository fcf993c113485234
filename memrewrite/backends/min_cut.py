"""The fewest bytes to keep so that everything needed can be made again: a minimum cut, nearest to what is needed."""

from collections.abc import Callable, Iterable, Sequence

import networkx
from networkx.algorithms.flow import dinitz

INFINITE = 1 << 60
_SOURCE, _SINK = (-1, 0), (-1, 1)


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
    network = networkx.DiGraph()  # each value is an edge, from where it is made to where it is there
    network.add_nodes_from((_SOURCE, _SINK))
    seen: set[int] = set()
    ahead = list(dict.fromkeys(needed))
    network.add_edges_from((((value, 1), _SINK) for value in ahead), capacity=INFINITE)
    while ahead:
        value = ahead.pop()
        if value in seen:
            continue
        seen.add(value)
        network.add_edge((value, 0), (value, 1), capacity=price(value))
        if not makes(value):
            network.add_edge(_SOURCE, (value, 0), capacity=INFINITE)
            continue
        for source in inputs(value):
            network.add_edge((source, 1), (value, 0), capacity=INFINITE)
            ahead.append(source)
    reaches = _reaching_sink(network)
    return {value for value in seen if (value, 1) in reaches and (value, 0) not in reaches}


def _reaching_sink(network: networkx.DiGraph) -> set[tuple[int, int]]:
    """The places from which the sink can still be reached once as much flows as can."""
    residual = dinitz(network, _SOURCE, _SINK)
    left = networkx.DiGraph((a, b) for a, b, edge in residual.edges(data=True) if edge["flow"] < edge["capacity"])
    left.add_node(_SINK)
    return networkx.ancestors(left, _SINK) | {_SINK}
