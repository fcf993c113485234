"""What one node does, in the numbers that storages have."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class NodeEffects:
    """What one node does to storages (ids into ``Effects.storages``) and what running it costs.

    ``saved`` are the storages autograd keeps because of this node: its inputs, its outputs or private ones.
    ``saves_output`` says that autograd keeps something this node makes.
    ``flops`` counts floating-point operations, ``moved`` the bytes read and written, those that are sent to other
    devices as many times as such a link is slower; the pair ``rerun`` holds how far these had counted at the node's
    last save, which is where a checkpoint that stops early stops: (0, 0) for a convolution, which saves its inputs
    before it runs, everything for a ReLU, which saves its output.
    ``statistics`` are written storages whose values no result depends on (batch normalization's running statistics).
    ``stale_save`` says that an operator changes a storage after saving it (RReLU's noise), which recomputation that
    stops early would never see filled. ``opaque`` says of a call that nobody looks into it, so that it may keep what it
    touches in its own ways, ``repeats`` whether it gives the same whenever it runs.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    outputs: frozenset[int]
    saved: frozenset[int]
    saves_output: bool
    random: bool
    flops: int
    moved: int
    rerun: tuple[int, int]
    statistics: frozenset[int] = frozenset()
    stale_save: bool = False
    opaque: bool = False
    repeats: bool = True

    @property
    def numbers(self) -> frozenset[int]:
        """All storages that these facts tell of."""
        return self.reads | self.writes | self.outputs | self.saved

    @property
    def changes(self) -> frozenset[int]:
        """The storages that it writes, and whose values results depend on."""
        return self.writes - self.statistics

    def renumbered(self, now: Mapping[int, int]) -> "NodeEffects":
        """The same facts where storages have other numbers."""

        def those(keys: frozenset[int]) -> frozenset[int]:
            return frozenset(now[key] for key in keys)

        reads, writes, outputs = those(self.reads), those(self.writes), those(self.outputs)
        saved, statistics = those(self.saved), those(self.statistics)
        return replace(self, reads=reads, writes=writes, outputs=outputs, saved=saved, statistics=statistics)
