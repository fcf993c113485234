"""The data of planning: what is known about a chain of nodes, and a plan over it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Held:
    """One storage made by the chain: its size in bytes, the node that makes it and, in order, those that read it.

    There is always one that does, if only the one that makes it. ``saver`` is the first node autograd keeps it for,
    None if it is not kept.
    """

    bytes: int
    producer: int
    uses: tuple[int, ...]
    saver: int | None

    @property
    def first_use(self) -> int:
        """The first node that reads it."""
        return self.uses[0]

    @property
    def last_use(self) -> int:
        """The last one."""
        return self.uses[-1]

    def saved(self) -> "Held":
        """The same storage as if its first use saved it, where nobody does and it has several."""
        return self if self.saver is not None or len(self.uses) == 1 else replace(self, saver=self.first_use)

    def moved(self, by: int) -> "Held":
        """The same storage in a chain that starts ``by`` nodes earlier."""
        saver = None if self.saver is None else self.saver + by
        return Held(self.bytes, self.producer + by, tuple(use + by for use in self.uses), saver)


@dataclass(frozen=True)
class Chain:
    """Nodes v0..vn-1 in execution order, as numbers.

    ``ms`` is the time to run each node, ``rerun_ms`` the time until its last save; ``saves`` whether autograd keeps
    anything for it; ``barrier`` the first node that an interval beginning there may not hold (itself: none begins
    there); ``work`` and ``forward`` the bytes in use besides what is held while the backward of the node and the node
    itself run (values and gradients passing by, temporaries, parameter gradients made so far), ``pending`` those in use
    as backward comes to the node; ``left`` those that the last step left there as long as forward runs for the first
    time; ``gradients`` the bytes of all parameter gradients the chain makes; ``save_bytes`` what it takes to keep what
    only the node makes, so that it does not run again with its segment (-1 where it has to), one array for each choice
    of nodes. ``on_demand`` says that with such a choice what a segment runs again is made as backward asks for it,
    every node once, as ``torch.compile`` does it (see ``plan.demand``).
    """

    ms: NDArray[np.float64]
    rerun_ms: NDArray[np.float64]
    saves: NDArray[np.bool_]
    barrier: Bytes
    work: Bytes
    forward: Bytes
    pending: Bytes
    storages: tuple[Held, ...]
    segment_ms: float
    gradients: int = 0
    left: int = 0
    save_bytes: tuple[Bytes, ...] = ()
    on_demand: bool = False

    def __len__(self) -> int:
        return len(self.ms)

    @property
    def of_one_node(self) -> int:
        """The bytes that one node takes at most besides what no plan moves: no bound below it has a plan.

        While the backward of a node runs, what autograd keeps for it first of all is there, kept or made again.
        """
        backward = self.work.copy()
        for storage in self.storages:
            if storage.saver is not None:
                backward[storage.saver] += storage.bytes
        return int(max(backward.max(initial=0), self.forward.max(initial=0)))


@dataclass(frozen=True)
class Plan:
    """Half-open intervals [a, b) of a chain to recompute in backward, at a cost of ``ms``; all other nodes are kept.

    Any two are disjoint, or one lies inside the other and comes after it: when backward reaches the outer one, that is
    run again and keeps only live-ins of the inner one, which is run once more when backward reaches it. In those of
    ``keeping``, none of which lies in another, nodes that can be kept do not run again.
    """

    intervals: tuple[tuple[int, int], ...] = ()
    ms: float = 0.0
    keeping: tuple[tuple[int, int], ...] = ()

    def part(self, start: int, end: int) -> "Plan":
        """The plan of the nodes [start, end) as a chain of their own."""
        kinds = (self.intervals, self.keeping)
        inside = (tuple((a - start, b - start) for a, b in kind if start <= a and b <= end) for kind in kinds)
        intervals, keeping = inside
        return Plan(intervals, self.ms, keeping)

    def numbered(self) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
        """Each interval with its number among those in the same interval, after the numbers of those it lies in."""
        around: list[tuple[tuple[int, ...], int]] = []  # the intervals that are open: their numbers and ends
        counts: Counter[tuple[int, ...]] = Counter()
        for a, b in self.intervals:
            while around and around[-1][1] <= a:
                around.pop()
            outer = around[-1][0] if around else ()
            path = (*outer, counts[outer])
            counts[outer] += 1
            around.append((path, b))
            yield path, (a, b)
