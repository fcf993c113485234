"""Kernels one after the other, the bytes that live while each runs, and what that becomes where two are made one.

Numbers alone: operations, and values that they make and read. A kernel is made of operations; what it makes and nobody
else reads is never written. An elementwise one writes over what it is the last to read, of the same kind. A value that
is made in parts, by several operations, is there from the first of them on.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple


class Operation(NamedTuple):
    """What an operation makes and reads, the operations that it has to come after, and its bytes besides."""

    makes: tuple[str, ...]
    reads: frozenset[str]
    after: frozenset[int]
    elementwise: bool = False
    scratch: int = 0


class Value(NamedTuple):
    """The bytes of a value, what it may be written over with (of the same kind), and whether it stays to the end."""

    bytes: int
    kind: object = None
    stays: bool = False


@dataclass(eq=False)
class Kernel:
    """Operations that run as one."""

    operations: tuple[int, ...]
    makes: frozenset[str]
    reads: frozenset[str]
    after: frozenset[int]
    elementwise: bool
    scratch: int


@dataclass(frozen=True)
class Fusion:
    """What stands from one place to another where two kernels are one, and the bytes that live meanwhile and after."""

    start: int
    end: int
    kernels: tuple[Kernel, ...]
    during: tuple[int, ...]
    afterwards: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes that live there."""
        return max(self.during)


class KernelOrder:
    """Operations in their order, each a kernel of its own at first. Values that none of them makes are given."""

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Mapping[str, Value],
        groups: Iterable[Iterable[int]] | None = None,
    ) -> None:
        self._values, self._operations = values, operations
        self._readers: dict[str, list[int]] = {}
        makers: dict[str, list[int]] = {}
        for i, each in enumerate(operations):
            for value in each.reads:
                self._readers.setdefault(value, []).append(i)
            for value in each.makes:
                makers.setdefault(value, []).append(i)
        self._given = sum(value.bytes for name, value in values.items() if name not in makers)
        self._makers = {value: each for value, each in makers.items() if len(each) > 1}
        kernels = [self._made_of(each) for each in groups or ([i] for i in range(len(operations)))]
        self._kernel = {i: kernel for kernel in kernels for i in kernel.operations}
        self._slots: list[Kernel | None] = [*kernels]
        self._slot = {kernel: i for i, kernel in enumerate(kernels)}
        self._during, self._afterwards = [0] * len(kernels), [0] * len(kernels)
        if kernels:
            self._put(self._course(0, len(kernels) - 1, kernels))

    @property
    def peak(self) -> int:
        """The most bytes that live."""
        return max(self._during, default=self._given)

    def place(self, operation: int) -> int:
        """Where the kernel of an operation stands."""
        return self._slot[self._kernel[operation]]

    def peak_between(self, one: int, other: int) -> int:
        """The most bytes that live from the kernel of one operation to that of another."""
        start, end = sorted(map(self.place, (one, other)))
        return max(self._during[start : end + 1])

    def fused(self, one: int, other: int) -> Fusion | None:
        """The kernels of two operations as one: it runs as soon as all that it reads is there, and those between them
        that it does not need run after it. None where one of these needs the first, and is needed by the other."""
        first, last = sorted((self._kernel[one], self._kernel[other]), key=self._slot.__getitem__)
        start, end = self._slot[first], self._slot[last]
        needed = {self._kernel[i] for i in last.after}
        before, behind = list[Kernel](), list[Kernel]()
        for kernel in filter(None, self._slots[end - 1 : start : -1] if end > start else ()):
            if kernel not in needed:
                behind.append(kernel)
            elif kernel.after.isdisjoint(first.operations):
                before.append(kernel)
                needed |= {self._kernel[i] for i in kernel.after}
            else:
                return None
        return self._course(
            start, end, [*before[::-1], self._made_of(first.operations + last.operations), *behind[::-1]]
        )

    def fuse(self, one: int, other: int) -> None:
        """Let the kernels of two operations be one."""
        if self._kernel[one] is not self._kernel[other] and (found := self.fused(one, other)) is not None:
            self._put(found)

    def _put(self, fusion: Fusion) -> None:
        start, end, kernels = fusion.start, fusion.end, fusion.kernels
        for kernel in filter(None, self._slots[start : end + 1]):
            del self._slot[kernel]
        for slot, kernel in enumerate(kernels, start):
            self._slot[kernel] = slot
            for i in kernel.operations:
                self._kernel[i] = kernel
        rest = end + 1 - start - len(kernels)
        self._slots[start : end + 1] = [*kernels, *[None] * rest]
        self._during[start : end + 1] = [*fusion.during, *[fusion.afterwards[-1]] * rest]
        self._afterwards[start : end + 1] = [*fusion.afterwards, *[fusion.afterwards[-1]] * rest]

    def _course(self, start: int, end: int, kernels: Sequence[Kernel]) -> Fusion:
        """The bytes that live while these kernels run instead of those that stand there."""
        here = {i for kernel in kernels for i in kernel.operations}
        now = self._afterwards[start - 1] if start else self._given
        dying, seen = list[set[str]](), set[str]()
        for kernel in reversed(kernels):
            touched = (kernel.reads | kernel.makes) - seen
            seen |= touched
            dying.append({value for value in touched if self._ends(value, here, start)})
        during, afterwards, begun = [], [], self._begun(kernels, here, start)
        for kernel, dead in zip(kernels, reversed(dying), strict=True):
            there = kernel.makes & begun
            made = {value for value in kernel.makes - there if self._is_written(value, kernel)}
            gone = dead - kernel.makes
            now += self._bytes(made)
            during.append(now - self._written_over(kernel, made, gone) + kernel.scratch)
            now -= self._bytes(gone | dead & (made | there))
            begun |= made & self._makers.keys()
            afterwards.append(now)
        return Fusion(start, end, tuple(kernels), tuple(during), tuple(afterwards))

    def _made_of(self, operations: Iterable[int]) -> Kernel:
        numbers = tuple(sorted(operations))
        each = [self._operations[i] for i in numbers]
        return Kernel(
            numbers,
            frozenset(value for operation in each for value in operation.makes),
            frozenset().union(*(operation.reads for operation in each)),
            frozenset().union(*(operation.after for operation in each)).difference(numbers),
            all(operation.elementwise for operation in each),
            max(operation.scratch for operation in each),
        )

    def _bytes(self, values: Iterable[str]) -> int:
        return sum(self._values[value].bytes for value in values)

    def _begun(self, kernels: Iterable[Kernel], here: Set[int], start: int) -> set[str]:
        """What these kernels make a part of, and others that stand before have made a part of already."""
        in_parts = {value for kernel in kernels for value in kernel.makes & self._makers.keys()}
        return {
            value for value in in_parts if any(i not in here and self.place(i) < start for i in self._makers[value])
        }

    def _ends(self, value: str, here: Set[int], start: int) -> bool:
        """Whether nothing reads a value, or makes a part of it, but these operations, and what stands before."""
        touched = (*self._readers.get(value, ()), *self._makers.get(value, ()))
        return not self._values[value].stays and all(i in here or self.place(i) < start for i in touched)

    def _is_written(self, value: str, kernel: Kernel) -> bool:
        """Whether a kernel writes a value that it makes: somebody else reads it, or nobody does at all."""
        readers = self._readers.get(value, ())
        return self._values[value].stays or not readers or any(i not in kernel.operations for i in readers)

    def _written_over(self, kernel: Kernel, made: set[str], gone: set[str]) -> int:
        """The bytes of what an operation of an elementwise kernel makes in the place of what it reads itself, and
        nothing does later."""
        left, found = {*gone}, 0
        for i in kernel.operations if kernel.elementwise and made and gone else ():
            operation = self._operations[i]
            for value in made.intersection(operation.makes):
                place = next((each for each in operation.reads & left if self._fits(value, each)), None)
                if place is not None:
                    left.remove(place)
                    found += self._values[value].bytes
        return found

    def _fits(self, one: str, other: str) -> bool:
        return self._values[one][:2] == self._values[other][:2]
