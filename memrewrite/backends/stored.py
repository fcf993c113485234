"""What backward writes, though kernels that read it could make it: the sum of larger values that nobody else reads.

Inductor makes what is elementwise again in each kernel that reads it, and keeps all that it is made of until the last
of them. What a linear layer with LoRA gives is the sum of a product in half precision and one in single precision: the
two take three times the bytes of their sum.
"""

from collections.abc import Sequence

from torch import Tensor, fx

from memrewrite.backends.facts import Facts
from memrewrite.backends.stretches import MOST_READS, READS

_WORTH = 2  # bytes that a written one stands for: it lies beside them until it is written, so that fewer gain little


def stored(known: Facts) -> frozenset[int]:
    """The nodes that take half the bytes, or fewer, of what of theirs is read by nobody else, and are read more than
    once."""
    readers = _readers(known)
    inside = _inside(known, readers)
    often = set[int]()  # those that are read more than once, if only as what is made of them alone
    for node in reversed(inside):
        (storage,) = known.makes[node]
        if len(readers[storage]) > 1 or readers[storage][0] in often:
            often.add(node)
    on_the_way = _OnTheWay(known, readers, inside)
    convolves = any("convolution" in str(node.target) for node in known.nodes)
    made_of: dict[int, frozenset[int]] = {}  # what is read in place of the storage that such a node makes
    found: dict[int, int] = {}  # by the storage that it makes
    for node in inside:
        (storage,) = known.makes[node]
        read = {each for i in known.inputs[node] for each in known.holds[i]}
        sources = frozenset(source for each in read for source in made_of.get(each, [each]))
        if len(sources) > (READS if len(readers[storage]) > 1 else MOST_READS):  # it is written anyway
            continue
        made_of[storage] = sources
        if node in often and _may_be_asked_for(known.nodes[node], convolves):
            own = {each for each in sources if on_the_way(node, each)}
            if sum(known.bytes[each] for each in own) >= _WORTH * known.bytes[storage]:
                made_of[storage] = frozenset([storage])
                found = {each: i for each, i in found.items() if each not in own} | {storage: node}
    return frozenset(found.values())


def _inside(known: Facts, readers: Sequence[Sequence[int]]) -> list[int]:
    """The nodes that are made in the kernels of what reads them, in order."""
    given_out = {*known.outputs, *known.gradients}
    found = []
    for node in sorted(known.fused - given_out):
        read = [reader for storage in known.makes[node] for reader in readers[storage]]
        if read and known.reader.issuperset(read):
            found.append(node)
    return found


class _OnTheWay:
    """Whether a node is on every way from a storage, through what is made in the kernels of its readers.

    That is, whether it postdominates it, as by "A Simple, Fast Dominance Algorithm" (Cooper, Harvey and Kennedy).
    """

    def __init__(self, known: Facts, readers: Sequence[Sequence[int]], inside: Sequence[int]) -> None:
        self._readers, self._end = readers, len(known.nodes)
        self._next: dict[int, int] = {}  # the first node on every way from such a node
        for node in reversed(inside):
            self._next[node] = self._common(known.makes[node][0])

    def __call__(self, node: int, storage: int) -> bool:
        at = self._common(storage)
        while at < node:
            at = self._next.get(at, self._end)
        return at == node

    def _common(self, storage: int) -> int:
        """The first node on every way from a storage."""
        found = self._end
        for number, reader in enumerate(self._readers[storage]):
            found = self._meet(found, reader) if number else reader
        return found

    def _meet(self, one: int, other: int) -> int:
        while one != other:
            low, other = min(one, other), max(one, other)
            one = self._next.get(low, self._end)
        return one


def _readers(known: Facts) -> list[list[int]]:
    """For each storage the nodes that read it, views aside."""
    found: list[list[int]] = [[] for _ in known.bytes]
    for i, inputs in enumerate(known.inputs):
        if i in known.views:
            continue
        for storage in {s for each in inputs for s in known.holds[each]}:
            found[storage].append(i)
    return found


def _may_be_asked_for(node: fx.Node, convolves: bool) -> bool:
    """Whether it is a tensor whose strides are numbers, and not for a convolution to choose."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or (convolves and value.dim() > 3):
        return False
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))
