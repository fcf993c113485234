"""How many bytes live at each node of forward and of a planned backward, as Inductor's kernels make and read them.

A value that is only read by kernels that make it themselves is never written: what it is made of lives until it is
read. A kernel may write over what it is the last to read, as Inductor lets elementwise ones do, also over what forward
handed to backward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from memrewrite.backends.facts import Facts
from memrewrite.backends.plan import Order

# A value that takes more reads than these is written, where several kernels read it and in any case: Inductor's
# settings realize_reads_threshold and realize_acc_reads_threshold.
_READS, _MOST_READS = 4, 8
_FAR = 64  # runs; what is further apart is not made in one kernel

Key = tuple[int, int]  # a storage, and the copy of its maker: a region, or -1


@dataclass(frozen=True)
class Run:
    """A node as it runs: what it makes and reads; the others are those of ``Facts``."""

    makes: tuple[Key, ...]
    reads: tuple[Key, ...]
    fused: bool
    reader: bool
    heavy: bool
    scratch: int


@dataclass(frozen=True)
class Watermark:
    """The peak in bytes, the number of the run at which it is reached, and what lives there."""

    peak: int
    at: int
    living: frozenset[Key]


@dataclass(frozen=True)
class Peaks:
    """The peaks of forward and backward in bytes, besides what lives all the time; ``saved`` between the two."""

    forward: Watermark
    backward: Watermark
    saved: int

    @property
    def peak(self) -> int:
        """The higher one."""
        return max(self.forward.peak, self.backward.peak)


def peaks(facts: Facts, order: Order) -> Peaks:
    """The peaks of an order; autograd lets go of what backward was given only when that is through."""
    saved = {s for node in order.saved for s in facts.holds[node]}
    outputs = {s for node in facts.outputs for s in facts.holds[node]}

    def size(key: Key) -> int:
        return facts.bytes[key[0]]

    ends = {(s, -1) for s in saved | outputs}
    forward = watermark(forward_runs(facts, order), (), ends, size)
    forward = replace(forward, peak=forward.peak + facts.held)
    held = {(s, -1) for s in outputs} | {(s, -1) for t in facts.tangents for s in facts.holds[t]}
    given = {(s, -1) for s in saved} | held
    runs, of = backward_runs(facts, order)
    last = {key for node in facts.gradients for key in of(node)}
    backward = watermark(runs, given, last | held, size)
    return Peaks(forward, backward, sum(facts.bytes[s] for s in saved))


def forward_runs(facts: Facts, order: Order) -> list[Run]:
    """What forward runs: all that its outputs and what is saved are made of."""
    needed: set[int] = set()
    ahead = [*facts.outputs, *order.saved]
    while ahead:
        if (node := ahead.pop()) not in needed and facts.forward[node]:
            needed.add(node)
            ahead += facts.inputs[node]
    found = []
    for node in sorted(needed - facts.given):
        reads = tuple((s, -1) for i in facts.inputs[node] for s in facts.holds[i])
        makes = tuple((s, -1) for s in facts.makes[node])
        found.append(_run(facts, node, makes, reads))
    return found


def backward_runs(facts: Facts, order: Order) -> tuple[list[Run], Callable[[int], tuple[Key, ...]]]:
    """What backward runs, and the storages that a gradient lies in."""
    held: list[tuple[Key, ...]] = []
    last: dict[int, tuple[Key, ...]] = {}

    def of(place: int) -> tuple[Key, ...]:
        return held[place] if place >= 0 else tuple((s, -1) for s in facts.holds[-1 - place])

    found = []
    for item in order.items:
        reads = tuple(key for place in item.reads for key in of(place))
        copy = -1 if item.region is None else item.region
        made = tuple((s, copy) for s in facts.makes[item.node])
        own = set(facts.holds[item.node])
        held.append(made or tuple(key for key in reads if key[0] in own))
        last[item.node] = held[-1]
        found.append(_run(facts, item.node, made, reads))
    return found, lambda node: last.get(node, tuple((s, -1) for s in facts.holds[node]))


def _run(facts: Facts, node: int, makes: tuple[Key, ...], reads: tuple[Key, ...]) -> Run:
    view = not makes and node in facts.views
    kinds = (node in facts.fused, node in facts.reader, node in facts.heavy)
    return Run(makes, () if view else reads, *kinds, facts.scratch[node])


def watermark(runs: Sequence[Run], given: Iterable[Key], ends: set[Key], size: Callable[[Key], int]) -> Watermark:
    """Where the most bytes live: ``given`` ones are there at first, those that ``ends`` names until the end."""
    kernels = _kernels(runs, ends, size)
    for key in given:
        kernels.last.setdefault(key, -1)
    dies: dict[int, list[Key]] = {}
    for key, at in kernels.last.items():
        if key not in ends:
            dies.setdefault(at, []).append(key)
    living = {key: size(key) for key in set(given)}
    now = sum(living.values())
    best, where, there = now, -1, frozenset(living)
    for key in dies.get(-1, ()):
        now -= living.pop(key, 0)
    for number, run in enumerate(runs):
        ended = dies.get(number, ())
        over = 0
        if number in kernels.makes:
            made = {key: size(key) for key in kernels.makes[number]}
            living |= made
            now += sum(made.values())
            over = _written_over(run, made, [living[key] for key in ended if key in living and key not in made])
        if (needed := now - over + run.scratch) > best:
            best, where, there = needed, number, frozenset(living)
        for key in ended:
            now -= living.pop(key, 0)
    return Watermark(best, where, there)


def _written_over(run: Run, made: Mapping[Key, int], dead: list[int]) -> int:
    """The bytes that an elementwise kernel writes over what it is the last to read, of the same size."""
    if not run.fused:
        return 0
    found = 0
    for bytes_ in made.values():
        if bytes_ in dead:
            dead.remove(bytes_)
            found += bytes_
    return found


@dataclass(frozen=True)
class _Kernels:
    """The storages that each run writes, with the later ones that are made in its kernel, and the last run that reads
    each, through kernels they fuse into."""

    makes: Mapping[int, list[Key]]
    last: dict[Key, int]


def _kernels(runs: Sequence[Run], ends: set[Key], size: Callable[[Key], int]) -> _Kernels:
    written, sources = _written(runs, ends)
    at = _moved(runs, written, sources, size)
    makes: dict[int, list[Key]] = {}
    last: dict[Key, int] = {}
    for number, run in enumerate(runs):
        for key in run.makes:
            if key in written:
                makes.setdefault(at[number], []).append(key)
    for number in range(len(runs) - 1, -1, -1):
        run = runs[number]
        inside = [last.get(key, number) for key in run.makes if key not in written]
        reading = max(inside) if inside and len(inside) == len(run.makes) else max([at[number], *inside])
        for key in run.reads:
            if last.get(key, -1) < reading:
                last[key] = reading
    for number, run in enumerate(runs):
        for key in run.makes:
            last.setdefault(key, at[number])
    return _Kernels(makes, last)


def _moved(
    runs: Sequence[Run], written: set[Key], sources: Mapping[Key, set[Key]], size: Callable[[Key], int]
) -> list[int]:
    """The run in whose kernel each is made: the latest elementwise one before it, if any, that makes values of its size
    and reads one of that size that it reads, too, when all that it reads is there."""
    at = list(range(len(runs)))
    born: dict[Key, int] = {}
    readers: dict[Key, tuple[int, int]] = {}  # the last elementwise kernel that reads a value, and the size it makes
    for number, run in enumerate(runs):
        kept = [key for key in run.makes if key in written]
        if run.fused and kept:
            bytes_ = size(kept[0])
            read = _read(run, sources)
            there = max((born.get(key, -1) for key in read), default=-1)
            first = max(there, number - _FAR)
            kernels = [readers[key] for key in read if key in readers and size(key) == bytes_]
            at[number] = max((i for i, made in kernels if i >= first and made == bytes_), default=number)
            readers |= dict.fromkeys(read, (at[number], bytes_))
        born |= dict.fromkeys(kept, at[number])
    return at


def _read(run: Run, sources: Mapping[Key, set[Key]]) -> set[Key]:
    """What is read where a run's values are made."""
    found: set[Key] = set()
    for key in run.reads:
        if key in sources:
            found |= sources[key]
        else:
            found.add(key)
    return found


def _written(runs: Sequence[Run], ends: set[Key]) -> tuple[set[Key], dict[Key, set[Key]]]:
    """The storages that are written, and of what each of the others is made, which is read in its place."""
    readers: dict[Key, list[int]] = {}
    for number, run in enumerate(runs):
        for key in run.reads:
            readers.setdefault(key, []).append(number)
    sources: dict[Key, set[Key]] = {}
    written: set[Key] = set()
    heavy: set[Key] = set()
    for run in runs:
        if not run.makes:
            continue
        read = _read(run, sources)
        weighs = run.heavy or not heavy.isdisjoint(run.reads)
        for key in run.makes:
            reading = readers.get(key, ())
            inside = run.fused and key not in ends and all(runs[i].reader for i in reading)
            twice = len(reading) > 1 and (weighs or len(read) > _READS)
            if not inside or twice or len(read) > _MOST_READS:
                written.add(key)
                continue
            sources[key] = read
            if weighs:
                heavy.add(key)
    return written, sources
