"""What a plan says of single nodes, for the generator of code: which segments a node stands in, what is kept of it.

Nodes are named and not held, so that marks stay right for a copy of their graph.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class NodeMark:
    """What is done with one node.

    ``segment`` are the numbers of the segments it stands in, the outermost first: (0, 1) is segment 1 inside segment 0.
    ``random`` says that it draws random numbers. ``skipped`` is a counter that nobody reads, which recomputation leaves
    alone; ``once`` names the running statistics it updates, which recomputation writes into scratch memory. ``keep``
    numbers a node that does not run again with its segment, ``statistics`` a batch normalization that only applies its
    statistics again.
    Of nodes in compiled code, ``draw`` says that its few random numbers stay, ``settled`` that its gradient is summed
    up as far as it goes before an earlier segment runs backward, ``in_turn`` where in its arguments the value stands,
    and after it the weight, of a product that is through with what it reads before the gradient of that is used.
    """

    segment: tuple[int, ...] = ()
    random: bool = False
    skipped: bool = False
    once: tuple[str, ...] = ()
    keep: int | None = None
    statistics: int | None = None
    draw: bool = False
    settled: bool = False
    in_turn: int | None = None


UNMARKED = NodeMark()


@dataclass(frozen=True)
class Marks:
    """The marks of a graph's nodes, by name; a node that is not among them is unmarked.

    ``room`` is how many bytes CUDA's allocator gets before the program runs; 0 where it gets them as tensors are made.
    ``budget`` is what the plan promises, in bytes, 0 for nothing; where it is ``strict``, no call may take more.
    ``holds_for`` are the sizes of inputs by name that it is known to hold for, where these are not the example's.
    """

    nodes: tuple[tuple[str, NodeMark], ...] = ()
    room: int = 0
    budget: int = 0
    strict: bool = False
    holds_for: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> NodeMark:
        return self._by_name.get(name, UNMARKED)

    def __bool__(self) -> bool:
        return self != NO_MARKS

    @property
    def bare(self) -> bool:
        """Whether they mark nodes alone."""
        return not (self.room or self.budget or self.strict or self.holds_for)

    def segments(self, names: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """The numbers of the segments that each of these nodes stands in."""
        return (self[name].segment for name in names)

    @cached_property
    def _by_name(self) -> Mapping[str, NodeMark]:
        return dict(self.nodes)


NO_MARKS = Marks()
