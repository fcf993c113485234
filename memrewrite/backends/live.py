"""How many bytes live at each node of forward and of a planned backward, as Inductor's kernels make and read them.

A value that is only read by kernels that make it themselves is never written: what it is made of lives until it is
read. A kernel may write over what it is the last to read, as Inductor lets elementwise ones do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from memrewrite.backends.facts import Facts
from memrewrite.backends.plan import Order

# A value that takes more reads than these is written, where several kernels read it and in any case: Inductor's
# settings realize_reads_threshold and realize_acc_reads_threshold.
_READS, _MOST_READS = 4, 8

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
    written, last = _written(runs, ends)
    for key in given:
        last.setdefault(key, -1)
    dies: dict[int, list[Key]] = {}
    for key, at in last.items():
        if key not in ends:
            dies.setdefault(at, []).append(key)
    first = set(given)
    living = {key: size(key) for key in first}
    now = sum(living.values())
    best, where, there = now, -1, frozenset(living)
    for key in dies.get(-1, ()):
        now -= living.pop(key, 0)
    for number, run in enumerate(runs):
        made = {key: size(key) for key in run.makes if key in written}
        dead = [key for key in dies.get(number, ()) if key in living]
        living |= made
        now += sum(made.values())
        over = _written_over(run, made, [living[key] for key in dead if key not in first and key not in made])
        if (needed := now - over + run.scratch) > best:
            best, where, there = needed, number, frozenset(living)
        now -= sum(living.pop(key, 0) for key in dies.get(number, ()))
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


def _written(runs: Sequence[Run], ends: set[Key]) -> tuple[set[Key], dict[Key, int]]:
    """The storages that are written, and the number of the last run that reads each, through kernels they fuse into."""
    readers: dict[Key, list[int]] = {}
    for number, run in enumerate(runs):
        for key in run.reads:
            readers.setdefault(key, []).append(number)
    sources: dict[Key, set[Key]] = {}
    written: set[Key] = set()
    heavy: set[Key] = set()
    for run in runs:
        read = {k for key in run.reads for k in sources.get(key, {key})}
        weighs = run.heavy or any(key in heavy for key in run.reads)
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
    last: dict[Key, int] = {}
    for number in range(len(runs) - 1, -1, -1):
        run = runs[number]
        at = max([number, *(last.get(key, -1) for key in run.makes if key not in written)])
        if all(key not in written for key in run.makes) and run.makes:
            at = max((last.get(key, -1) for key in run.makes), default=number)
        for key in run.reads:
            last[key] = max(last.get(key, -1), at)
    for number, run in enumerate(runs):
        for key in run.makes:
            last.setdefault(key, number)
    return written, last
