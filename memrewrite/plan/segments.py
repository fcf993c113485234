"""The data of planning: what is known about a chain of nodes, and a plan over it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Held:
    """One storage made by the chain: its size in bytes, and the nodes that make it, first and last read it.

    ``saver`` is the first node autograd keeps it for, None if it is not kept.
    """

    bytes: int
    producer: int
    first_use: int
    last_use: int
    saver: int | None

    def moved(self, by: int) -> "Held":
        """The same storage in a chain that starts ``by`` nodes earlier."""
        saver = None if self.saver is None else self.saver + by
        return Held(self.bytes, self.producer + by, self.first_use + by, self.last_use + by, saver)


@dataclass(frozen=True)
class Chain:
    """Nodes v0..vn-1 in execution order, as numbers.

    ``ms`` is the time to run each node, ``rerun_ms`` the time until its last save; ``saves`` whether autograd keeps
    anything for it; ``reach`` the first node that an interval beginning there may not hold (itself: none begins there);
    ``work`` the bytes that are live besides what is held while the node or its backward runs (values and gradients
    passing by, parameter gradients made so far); ``gradients`` the bytes of all parameter gradients the chain makes.
    """

    ms: NDArray[np.float64]
    rerun_ms: NDArray[np.float64]
    saves: NDArray[np.bool_]
    reach: Bytes
    work: Bytes
    storages: tuple[Held, ...]
    segment_ms: float
    gradients: int = 0

    def __len__(self) -> int:
        return len(self.ms)


@dataclass(frozen=True)
class Plan:
    """Disjoint half-open intervals [a, b) of a chain to recompute in backward, at a cost of ``ms``; others are kept."""

    intervals: tuple[tuple[int, int], ...] = ()
    ms: float = 0.0
