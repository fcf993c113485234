"""What backward writes, though kernels that read it could make it: the sum of larger values that nobody else reads.

Inductor makes what is elementwise again in each kernel that reads it, and keeps all that it is made of until the last
of them. What a linear layer with LoRA gives is the sum of a product in half precision and one in single precision: the
two take three times the bytes of their sum.
"""

from collections.abc import Sequence

from torch import Tensor

from memrewrite.backends.facts import Facts


def stored(known: Facts) -> frozenset[int]:
    """The nodes that take fewer bytes than what of theirs is read by nobody else, and are read more than once."""
    readers = _readers(known)
    given_out = {*known.outputs, *known.gradients}

    def is_inside(node: int) -> bool:
        read = [reader for storage in known.makes[node] for reader in readers[storage]]
        return node in known.fused and bool(read) and known.reader.issuperset(read)

    inside = {i for i in range(len(known.nodes)) if i not in given_out and is_inside(i)}
    often = set[int]()  # those that are read more than once, if only as what is made of them alone
    for node in sorted(inside, reverse=True):
        (storage,) = known.makes[node]
        if len(readers[storage]) > 1 or readers[storage][0] in often:
            often.add(node)
    made_of: dict[int, frozenset[int]] = {}  # what is read in place of the storage that such a node makes
    found: dict[int, int] = {}  # by the storage that it makes
    for node in sorted(inside):
        (storage,) = known.makes[node]
        read = {each for i in known.inputs[node] for each in known.holds[i]}
        sources = frozenset(source for each in read for source in made_of.get(each, [each]))
        made_of[storage] = sources
        if node in often and _is_plain(known, node):
            own = {each for each in sources if _only(known, readers, inside, each, node)}
            if sum(known.bytes[each] for each in own) > known.bytes[storage]:
                made_of[storage] = frozenset([storage])
                found = {each: i for each, i in found.items() if each not in own} | {storage: node}
    return frozenset(found.values())


def _only(known: Facts, readers: Sequence[Sequence[int]], inside: set[int], storage: int, node: int) -> bool:
    """Whether all that reads a storage is ``node``, or made in the kernels of what reads it and read for it alone."""
    for reader in readers[storage]:
        if reader == node:
            continue
        if reader > node or reader not in inside:
            return False
        if not all(_only(known, readers, inside, made, node) for made in known.makes[reader]):
            return False
    return True


def _readers(known: Facts) -> list[list[int]]:
    """For each storage the nodes that read it, views aside."""
    found: list[list[int]] = [[] for _ in known.bytes]
    for i, inputs in enumerate(known.inputs):
        if i in known.views:
            continue
        for storage in {s for each in inputs for s in known.holds[each]}:
            found[storage].append(i)
    return found


def _is_plain(known: Facts, node: int) -> bool:
    """Whether it is a tensor whose sizes are numbers."""
    value = known.nodes[node].meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
