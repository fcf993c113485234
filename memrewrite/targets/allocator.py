"""PyTorch's caching allocator for CUDA, in numbers: what it hands out and reserves for a sequence of requests.

By ``c10/cuda/CUDACachingAllocator.cpp`` with room enough on the device: requests of up to 1 MiB share segments of
2 MiB, those below 10 MiB segments of 20 MiB, larger ones get a segment of their own, rounded up to 2 MiB. The best
fitting free block is used, of those that fit alike the one at the lowest address, and the driver hands out addresses
from above downwards. What a block has too much becomes a block of its own, if that is large enough. Blocks that are
free side by side become one, and segments are kept; where a process may hold no more, those that are free as a whole go
before another is asked for. Each stream has segments of its own. Of the settings in ``PYTORCH_CUDA_ALLOC_CONF`` only
``expandable_segments`` is known: all blocks of a pool then lie in one segment that grows by pages, and every rest is
split off.
"""

import functools
import itertools
import os
import re
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memrewrite.runtime.room import missing
from memrewrite.targets.layout import Layout, Segment

GRANULE = 512  # bytes; every request is rounded up to a multiple of it
_MIB = 2**20
UNSPLIT = _MIB  # the largest rest that stays with a block from the pool of large ones
_SMALL = _MIB  # the largest request that goes to the pool of small blocks
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB  # and the pages of segments that grow
_OWN_SEGMENT = 10 * _MIB  # the smallest request that gets a segment of its own,
_ROUND = 2 * _MIB  # which is a multiple of this
_REPEATS = 8  # steps; what they find free was the same from the third or fourth on wherever that was measured
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def rounded(size: int, granule: int = GRANULE) -> int:
    """The next multiple of ``granule``; of 512, it is what the allocator counts for ``size`` bytes."""
    return -(-size // granule) * granule


@dataclass(eq=False, slots=True)
class Block:
    """``size`` bytes at an address of their own in their pool, between their neighbours in the segment."""

    address: int
    size: int
    small: bool
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False
    stream: int = 0

    @property
    def pool(self) -> "_Pool":
        """Where it lies while it is free."""
        return self.stream, self.small

    @property
    def alone(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


_Pool = tuple[int, bool]
"""A stream's small blocks, or its large ones."""
# What is recorded of a step: the block, bytes asked for or minus those freed, and whether the request may go without.
_Request = tuple[Block, int, bool]
_ROOM = Block(0, 0, False)  # in a request: for so many bytes room is made


@dataclass
class Allocator:
    """``allocated`` and ``reserved`` are bytes in use: those of the blocks handed out, and of all segments.

    ``highest`` is the most that was allocated since the last recorded step began.
    ``limit`` is how much may be reserved (``torch.cuda.set_per_process_memory_fraction``), None for any amount: then
    segments go where they can (``retries`` counts how often). A request that fits even so not is served nevertheless,
    and ``most``, the highest that ``reserved`` was, is above the limit. From now on the stream of number ``stream``
    asks.

    A block may be larger than was asked for: where segments do not grow, a rest of up to 1 MiB is not split off a block
    from the pool of large ones. Of a ``layout`` those segments stand already: who asks for what is given there, before
    the first step is recorded, gets its block.
    """

    expandable: bool = False
    limit: int | None = None
    allocated: int = 0
    highest: int = 0
    reserved: int = 0
    most: int = 0
    retries: int = 0
    stream: int = 0
    layout: Layout = ()
    _given: dict[int, list[Block]] = field(default_factory=lambda: defaultdict(list))
    _free: dict[_Pool, list[tuple[int, int, Block]]] = field(default_factory=lambda: defaultdict(list))
    _last: dict[_Pool, Block] = field(default_factory=dict)  # of segments that grow, the one at the highest address
    _lowest: int = 0  # the address of the last segment that does not grow
    _steps: list[list[_Request]] = field(default_factory=lambda: [[]])

    def __post_init__(self) -> None:
        if self.expandable:  # blocks are what was asked for then, and holes are few
            self.layout = ()
        for segment in self.layout:
            self._stand(segment)
        self._lowest = min((segment.address for segment in self.layout), default=0)
        self.most = self.reserved

    def _stand(self, segment: Segment) -> None:
        address, before = segment.address, None
        for each in segment.blocks:
            block = Block(address, each.size, segment.small, before)
            if before is not None:
                before.after = block
            if each.free:
                self._offer(block)
            elif each.given:
                self._given[rounded(each.given)].append(block)
            address, before = address + each.size, block
        self.reserved += address - segment.address

    def allocate(self, size: int, spare: bool = False) -> Block:
        """The block for a request of ``size`` bytes, more than none; ``spare`` as in ``follow``."""
        size = rounded(size)
        small = size <= _SMALL
        if given := self._given.get(size):
            block = given.pop(0)
        else:
            block = self._best(size, small) or self._new(size, small)
            rest = block.size - size
            if rest >= GRANULE if small or self.expandable else rest > UNSPLIT:
                self._split(block, size)
        self.allocated += block.size
        self.highest = max(self.highest, self.allocated)
        self._steps[-1].append((block, size, spare))
        return block

    def release(self, block: Block) -> None:
        """Take a block back; with free neighbours it becomes one."""
        self.allocated -= block.size
        self._steps[-1].append((block, -block.size, False))
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after)
        self._offer(block)

    def follow(self, course: Sequence[int], spare: bool = False) -> tuple[list[tuple[int, Block]], int]:
        """Serve requests in order: ``n > 0`` asks for n bytes, ``-k`` gives back what the k-th request got.

        With ``spare`` those that are given back are left out where there is no room for them within the limit.
        Returns what stays, as bytes asked for and their block, and the most bytes that were allocated meanwhile.
        """
        given: list[tuple[int, Block] | None] = []
        scratch = {-step - 1 for step in course if step < 0 and spare}
        highest = self.allocated
        for step in course:
            if step > 0:
                may_go = len(given) in scratch
                given.append(None if may_go and not self._has_room(step) else (step, self.allocate(step, may_go)))
                highest = max(highest, self.allocated)
            elif (found := given[-step - 1]) is not None:
                self.release(found[1])
                given[-step - 1] = None
        return [each for each in given if each is not None], highest

    def make_room(self, total: int) -> None:
        """What ``runtime.room.make_room`` does."""
        self._steps[-1].append((_ROOM, total, False))
        if missing(total, self.reserved):
            self._give_back()
            if self.limit is None or total <= self.limit:
                self._offer(self._new(missing(total, self.reserved), False))

    def record(self) -> None:
        """From here on another step runs."""
        self._given.clear()
        self.highest = self.allocated
        self._steps.append([])

    def asked(self, repeated: int = 1) -> "Requests":
        """What it was asked for until now; the last ``repeated`` steps come again and again."""
        return Requests(tuple(map(tuple, self._steps)), repeated, self.expandable, self.layout)

    def serve(
        self, step: Sequence[_Request], given: dict[Block, Block | None], standing: list[Block] | None = None
    ) -> None:
        """Serve what another allocator, or this one earlier, was asked for.

        ``given`` is what stands for its blocks, None for one that it goes without. What it gives back besides is one of
        ``standing``, of about that size.
        """
        for block, size, spare in step:
            self.stream = block.stream
            if block is _ROOM:
                self.make_room(size)
            elif size > 0:
                given[block] = None if spare and not self._has_room(size) else self.allocate(size, spare)
            elif block in given:
                if (known := given.pop(block)) is not None:
                    self.release(known)
            elif standing:
                old = min(standing, key=functools.partial(_unlike, block, size))
                standing.remove(old)
                self.release(old)

    def settle(self, steps: int = 1) -> int:
        """The most bytes that are reserved once more ``steps`` like the last ones, over and over, reserve no more.

        The first of them find other blocks free than those did, of which some are larger: ``highest`` is that of all of
        them after. No block from before can be released after.
        """
        last = [list(step) for step in self._steps[-steps:]]
        standing: dict[Block, None] = {}
        for block, size, _ in itertools.chain.from_iterable(last):
            if size < 0:
                standing.pop(block, None)
            elif block is not _ROOM:
                standing[block] = None
        seen: set[tuple[tuple[int, int], ...]] = set()
        for _ in range(_REPEATS):
            for step in last:
                standing = self._repeat(step, list(standing))
            stand = self._stand_of(standing)
            if stand in seen:
                break
            seen.add(stand)
        return self.most

    def _stand_of(self, standing: Iterable[Block]) -> tuple[tuple[int, int], ...]:
        """What tells how the next step is served: where blocks are free, and where those are that it lets go of."""
        free = (block for each in self._free.values() for _, _, block in each)
        return tuple((block.address, block.size) for block in itertools.chain(standing, free))

    def _repeat(self, step: list[_Request], standing: list[Block]) -> dict[Block, None]:
        """Serve a step again, which lets go of the blocks that the one before left ``standing``; returns its own."""
        now: dict[Block, Block | None] = {}
        self.serve(step, now, standing)
        return dict.fromkeys(block for block in now.values() if block is not None)

    def _has_room(self, size: int) -> bool:
        """Whether a request can be served within the limit, if need be by giving back what is free."""
        size = rounded(size)
        free = self._free[self.stream, size <= _SMALL]
        if self.limit is None or bisect_left(free, (size,)) < len(free):
            return True
        length = self._length(size, size <= _SMALL)
        if self.reserved + length > self.limit:
            self.retries += 1
            self._give_back()
        return self.reserved + length <= self.limit

    def _best(self, size: int, small: bool) -> Block | None:
        free = self._free[self.stream, small]
        place = bisect_left(free, (size,))  # before all of that size
        if place == len(free):
            return None
        block = free[place][2]
        self._take(block)
        return block

    def _new(self, size: int, small: bool) -> Block:
        """A segment; or the segment of the pool grows until its last block is large enough."""
        pool = self.stream, small
        last = self._last.get(pool) if self.expandable else None
        length = self._length(size, small)
        if self.limit is not None and self.reserved + length > self.limit:
            self.retries += 1
            self._give_back()
        self.reserved += length
        self.most = max(self.most, self.reserved)
        if not self.expandable:
            self._lowest -= length
            return Block(self._lowest, length, small, stream=self.stream)
        block = Block(0 if last is None else last.address + last.size, length, small, stream=self.stream)
        self._last[pool] = block
        if last is None:
            return block
        block.before, last.after = last, block
        return self._joined(last, block) if last.free else block

    def _length(self, size: int, small: bool) -> int:
        """The bytes of the segment that is asked for, or by which that of the pool grows, for a request of ``size``."""
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if not self.expandable:
            return page if size < _OWN_SEGMENT else rounded(size, _ROUND)
        last = self._last.get((self.stream, small))
        return rounded(size - last.size if last is not None and last.free else size, page)

    def _give_back(self) -> None:
        """Return the segments that are free as a whole, as the allocator does when it gets no other.

        Not those that grow, of which pages would go: they leave little free.
        """
        for free in self._free.values() if not self.expandable else ():
            self.reserved -= sum(size for size, _, block in free if block.alone)
            free[:] = [item for item in free if not item[2].alone]

    def _split(self, block: Block, size: int) -> None:
        """Leave ``block`` ``size`` bytes and offer the rest."""
        rest = Block(block.address + size, block.size - size, block.small, block, block.after, stream=block.stream)
        block.size = size
        self._follow(rest, block)
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        self._offer(rest)

    def _joined(self, first: Block, second: Block) -> Block:
        for block in (first, second):
            if block.free:
                self._take(block)
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        self._follow(first, second)
        return first

    def _follow(self, block: Block, last: Block) -> None:
        """``block`` is the pool's last one where ``last`` was."""
        if self._last.get(block.pool) is last:
            self._last[block.pool] = block

    def _offer(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        block.free = False
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]


@dataclass(frozen=True)
class Requests:
    """What an allocator was asked for, step by step, of which the last ``repeated`` come over and over.

    A step asks for the same whatever it gets, so one look at it tells what any allocator of that ``layout`` reserves
    for it.
    """

    steps: tuple[tuple[_Request, ...], ...]
    repeated: int
    expandable: bool
    layout: Layout = ()

    def reserved_under(self, limit: int | None, room: int | None = None) -> int:
        """The most bytes that are reserved where no more than ``limit`` may be.

        Where room was made, it is for ``room`` bytes, None for as many as it was.
        """
        allocator = Allocator(self.expandable, limit, layout=self.layout)
        given: dict[Block, Block | None] = {}
        for number, step in enumerate(self.steps):
            if number:
                allocator.record()
            allocator.serve(step if room is None else _with_room(step, room), given)
        return allocator.settle(self.repeated)


def _unlike(block: Block, size: int, other: Block) -> tuple[bool, int]:
    """How much another block differs from one of which ``-size`` bytes are given back."""
    return other.stream != block.stream, abs(other.size + size)


def _with_room(step: Sequence[_Request], total: int) -> list[_Request]:
    return [(block, total if block is _ROOM else size, spare) for block, size, spare in step]


def cuda_allocator(layout: Layout = ()) -> Allocator:
    """An allocator as PyTorch's environment configures it, with nothing but what stands in a layout."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return Allocator(any(map(_EXPANDABLE.search, settings)), layout=layout)


def allocator_on(device_type: str, layout: Layout = ()) -> Allocator | None:
    """The same; None on other devices than CUDA."""
    return cuda_allocator(layout) if device_type == "cuda" else None
