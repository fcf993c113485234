"""Which storages the operators of a node touch, and what they cost: noted as they run on fake tensors.

What works piece by piece, a layer's MLP in tiles or a loss with its head, is noted once for arguments that are alike:
its hundreds of operators do the same in each layer, and again after each rewrite.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from memrewrite.observe.flops import FLOPS
from memrewrite.simulate.fake.trials import made_again, made_of
from memrewrite.simulate.memory.repeats import told
from memrewrite.targets.allocator import rounded
from memrewrite.targets.eager import Target
from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.operators import OpOverload, schema_name, written_arguments
from memrewrite.torch_internals.pytrees import TreeSpec, tensors_in, tree_flatten, tree_unflatten
from memrewrite.torch_internals.spread import local_part, wraps_local

Origin = Literal["parameter", "buffer", "input", "node"]


@dataclass(frozen=True)
class Storage:
    """One storage: its size in bytes (rounded up to 512, the CUDA allocator's granule) and where it comes from.

    ``producer`` is the index of the node that made it, -1 for what was there before the first node.
    """

    bytes: int
    origin: Origin
    producer: int


@dataclass(frozen=True, slots=True)
class Part:
    """What of a storage a view sees: elements from ``start`` to ``end``, of each row those from ``first`` to ``last``.

    Rows are what its largest stride goes over, counted from where the storage begins; 0 where it has none.
    """

    dtype: torch.dtype
    start: int
    end: int
    row: int
    first: int
    last: int

    @classmethod
    def of(cls, view: Tensor) -> "Part":
        """That of one with strides; any other counts as all of its storage."""
        if view.layout is not torch.strided:
            return cls(view.dtype, 0, int(view.untyped_storage().nbytes()), 0, 0, 0)
        start = int(view.storage_offset())
        reach = sorted((stride, size - 1) for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1)
        row = reach[-1][0] if reach else 0
        inside = 1 + sum(stride * steps for stride, steps in reach[:-1])
        first = start % row if row else 0
        return cls(view.dtype, start, start + inside + row * (reach[-1][1] if reach else 0), row, first, first + inside)

    def apart(self, other: "Part") -> bool:
        """Whether the two have certainly no element in common.

        So have the gates of a GRU, chunks of one product that its cell writes in place, one after the other.
        """
        if self.dtype != other.dtype:
            return False
        if self.end <= other.start or other.end <= self.start:
            return True
        within = self.row == other.row and max(self.last, other.last) <= self.row
        return within and (self.last <= other.first or other.last <= self.first)


# These write their running statistics without saying so in their schema; every other write is declared and observed.
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_STATISTICS, _TRAINING = slice(3, 5), 5  # positions of the two buffers, and of the flag that makes them do so


_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
# How many times slower than memory a link to another device is: 4.2 TB/s of an H200 against 450 GB/s in a direction of
# its NVLink (NVIDIA's data). What a collective is given and gives is about what it sends.
_LINK = 9


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a function did that works piece by piece: storages it made, by bytes, and those it read and wrote.

    Storages are numbered: those of the tensors it was given, then those it made; ``kept`` are those of its results.
    """

    results: tuple[Any, ...]
    tree: TreeSpec
    made: tuple[int, ...]
    kept: tuple[int | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    random: bool
    flops: int
    moved: int


_SEEN: dict[tuple[Any, ...], _Seen | None] = {}  # by function and arguments; None where it is to run each time


class Recorder(Layer):
    """Notes for the node being run which storages its operators touch, on a device of that type."""

    def __init__(self, target: Target, device_type: str) -> None:
        super().__init__()
        self.target, self.device_type = target, device_type
        self.storages: dict[int, Storage] = {}
        self._ids: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that an id is never given twice
        self._away = False  # whether nothing is noted of what runs
        self.begin(-1)

    def begin(self, index: int) -> None:
        """The node of that index runs next."""
        self.index = index
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.saved: set[int] = set()
        self._saved_parts: dict[int, list[Part]] = defaultdict(list)
        self.statistics: set[int] = set()
        self.random = self.stale_save = False
        self.flops = self.moved = 0
        self.rerun = (0, 0)

    def storage(self, tensor: Tensor, origin: Origin = "node", size: int = 0) -> int:
        """The id of the tensor's storage; one not met before counts as made by the current node, of ``size`` bytes."""
        storage = local_part(tensor).untyped_storage()
        if id(storage) not in self._ids:
            self._ids[id(storage)] = len(self.storages)
            self._alive.append(storage)
            self.storages[self._ids[id(storage)]] = Storage(rounded(size or storage.nbytes()), origin, self.index)
        return self._ids[id(storage)]

    def make(self, sizes: Iterable[int]) -> range:
        """The ids of storages of so many bytes that the current node makes, without running."""
        first = len(self.storages)
        self.storages |= {number: Storage(size, "node", self.index) for number, size in enumerate(sizes, first)}
        return range(first, len(self.storages))

    def name(self, tensor: Tensor, key: int) -> None:
        """From now on the tensor's storage has this id."""
        storage = local_part(tensor).untyped_storage()
        self._ids[id(storage)] = key
        self._alive.append(storage)

    def pack(self, tensor: Tensor) -> object:
        """The saved-tensors hook; returns a token because returning the tensor builds an uncollectable cycle."""
        key = self.storage(tensor)
        self.saved.add(key)
        self._saved_parts[key].append(Part.of(local_part(tensor)))
        self.rerun = (self.flops, self.moved)
        return _TOKEN

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(wraps_local, types)):
            return NotImplemented  # its own rules come first, and lead here again with local parts
        kwargs = kwargs or {}
        if self._away:
            return self.below(func, types, args, kwargs)
        inputs = [(self.storage(t), t) for t in tensors_in((args, kwargs))]
        touched = {key for key, _ in inputs}
        changed = [(self.storage(t), t) for t in tensors_in(written_arguments(func, args, kwargs))]
        written = {key for key, _ in changed}
        self.stale_save |= any(self._touches_saved(key, t) for key, t in changed)
        self.statistics |= {self.storage(t) for t in tensors_in(_statistics(func, args))}
        result = self.below(func, types, args, kwargs)
        if size := self.target.read_as(func, args, result):
            self.storage(result, size=size)
        outputs = [(self.storage(t), t) for t in tensors_in(result)]
        self.reads |= touched
        self.writes |= written | self.statistics
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if self.writes or any(key not in touched for key, _ in outputs):  # a pure view moves nothing
            slower = _LINK if func.namespace in _COLLECTIVES else 1
            self.moved += slower * sum(t.nbytes for _, t in inputs + outputs)
        if (count := FLOPS.get(func.overloadpacket)) is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        return result

    def _touches_saved(self, key: int, written: Tensor) -> bool:
        saved = self._saved_parts.get(key, ())
        return bool(saved) and not all(map(Part.of(local_part(written)).apart, saved))

    def once(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """What runs in the place of ``own``, which works piece by piece: that, for arguments that are not known yet."""

        def run(*args: Any) -> Any:
            call = told(own, args, self.device_type)
            if call is None or self.target.fuses:
                return own(*args)
            words, tensors = (*call[0], bool(self.writes)), call[1]  # once there are any, views count as moved
            if not all(id(tensor.untyped_storage()) in self._ids for tensor in tensors):
                return own(*args)
            if words not in _SEEN:
                return self._noted(words, own, args, tensors)
            seen = _SEEN[words]
            return own(*args) if seen is None else self._again(seen, tensors)

        return run

    def _noted(self, words: tuple[Any, ...], own: Callable[..., Any], args: Any, given: list[Tensor]) -> Any:
        """Run it, and remember what it did."""
        reads, random, flops, moved, first = self.reads, self.random, self.flops, self.moved, len(self.storages)
        self.reads, self.random, saved = set(), False, set(self.saved)
        written, versions = set(self.writes), [tensor._version for tensor in given]
        try:
            results = own(*args)
            done = self._seen(results, given, first, written, self.flops - flops, self.moved - moved)
            unchanged = self.saved == saved and versions == [tensor._version for tensor in given]
            _SEEN[words] = done if unchanged else None
        finally:
            self.reads, self.random = reads | self.reads, random or self.random
        return results

    def _seen(
        self, results: Any, given: list[Tensor], first: int, written: set[int], flops: int, moved: int
    ) -> _Seen | None:
        """What was done since there were ``first`` storages, and since those ``written`` were all that had been.

        None where that is more than to make these results.
        """
        made = range(first, len(self.storages))
        numbers = {key: number for number, key in enumerate(made, len(given))}
        numbers |= {self.storage(tensor): number for number, tensor in enumerate(given)}
        leaves, tree = tree_flatten(results)
        kept: list[int | None] = []
        for leaf in leaves:
            if leaf is not None and (type(leaf) is not FakeTensor or leaf.requires_grad):
                return None
            key = None if leaf is None else self.storage(leaf)
            if key is not None and key not in made:
                return None
            kept.append(None if key is None else key - first)
        writes = self.writes - written
        if not writes.issubset(made) or not numbers.keys() >= self.reads:
            return None
        return _Seen(
            made_of(leaves, given),
            tree,
            tuple(self.storages[key].bytes for key in made),
            tuple(kept),
            tuple(numbers[key] for key in self.reads),
            tuple(numbers[key] for key in writes),
            self.random,
            flops,
            moved,
        )

    def _again(self, seen: _Seen, given: list[Tensor]) -> Any:
        """Results like those, and noted as all that led to them was."""
        self._away = True
        try:
            results = made_again(seen.results, given)
        finally:
            self._away = False
        numbers = list(map(self.storage, given))
        made = self.make(seen.made)
        numbers += made
        for leaf, number in zip(results, seen.kept, strict=True):
            if number is not None:
                self.name(leaf, made[number])
        self.reads |= {numbers[number] for number in seen.reads}
        self.writes |= {numbers[number] for number in seen.writes}
        self.random |= seen.random
        self.flops += seen.flops
        self.moved += seen.moved
        return tree_unflatten(results, seen.tree)


def _statistics(func: Any, args: Any) -> list[Any]:
    """The running statistics that batch normalization updates."""
    return [*args[_STATISTICS]] if _normalizes_batches(func) and args[_TRAINING] else []


@functools.cache
def _normalizes_batches(func: OpOverload) -> bool:
    return schema_name(func) in _BATCH_NORMS


_TOKEN = object()
