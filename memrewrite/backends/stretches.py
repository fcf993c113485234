"""Runs that follow each other, and what is known of them: simulated once for all orders that have them in common.

What a stretch of runs does to memory depends on little besides itself: on what it reads that is not written but made
where it is read, on kernels that have just run, on what it makes that is read later, and on what dies in it. What each
stage tells is kept by just that, so that a simulation looks anew at those stretches alone where something is another.
Positions are counted from the beginning of a stretch: what is below zero lies before it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

# A value that takes more reads than these is written, where several kernels read it and in any case: Inductor's
# settings realize_reads_threshold and realize_acc_reads_threshold.
READS, MOST_READS = 4, 8
FAR = 64  # runs; what is further apart is not made in one kernel
NEVER = -(1 << 40)  # no position

Key = int  # a storage; of copies, one by region
Size = Callable[[Key], int]
Reads = tuple[int, bool]  # how many runs read something, and whether all make it in their own kernels
Event = tuple[int, Key, bool]  # from a position on something lives (True), or no longer after it (False)
Recent = tuple[int, int, int]  # where a value was last written, and where a kernel last read it that makes this much


class Run(NamedTuple):
    """A node as it runs, ``at`` a position: what it makes and reads; the others are those of ``Facts``."""

    at: int
    makes: tuple[Key, ...]
    reads: tuple[Key, ...]
    fused: bool
    reader: bool
    heavy: bool
    scratch: int
    stored: bool = False


class Inside(NamedTuple):
    """What a value is made of that is not written, which is read in its place; ``heavy``: it is not made twice."""

    read: frozenset[Key]
    heavy: bool


class Curve(NamedTuple):
    """The most bytes that a stretch needs, where, and how many more live after it; counted from its beginning."""

    highest: int
    at: int
    rise: int


class Stretch:
    """Some runs, of which ``ends`` names what lives to the end; ``length`` counts those that do nothing, too."""

    def __init__(self, runs: Iterable[Run], length: int, ends: frozenset[Key], size: Size) -> None:
        self.runs, self.length, self.ends, self.size = tuple(runs), length, ends, size
        self.makes = frozenset(key for run in self.runs for key in run.makes)
        counts: dict[Key, Reads] = {}
        for run in self.runs:
            for key in run.reads:
                count, inside = counts.get(key, (0, True))
                counts[key] = count + 1, inside and run.reader
        self.reads = {key: each for key, each in counts.items() if key in self.makes}
        self.outside = {key: each for key, each in counts.items() if key not in self.makes}
        self._written: dict[object, Written] = {}

    def written(self, later: Mapping[Key, Reads], sources: Mapping[Key, Inside]) -> "Written":
        """What is written where this much of it is read ``later``, and values from before are made of ``sources``."""
        given = {key: sources[key] for key in self.outside if key in sources}
        known = (tuple(later.items()), tuple(given.items()))
        if known not in self._written:
            self._written[known] = Written(self, later, given)
        return self._written[known]


class Written:
    """A stretch of which it is known what is written: ``kept`` by run; the rest is read as ``sources``."""

    def __init__(self, stretch: Stretch, later: Mapping[Key, Reads], given: Mapping[Key, Inside]) -> None:
        self.stretch, self.later = stretch, later
        sources = dict(given)
        self.kept: list[tuple[Key, ...]] = []
        self.read: list[frozenset[Key]] = []  # of fused runs that write something
        for run in stretch.runs:
            kept, read = self._kept(run, sources)
            self.kept.append(kept)
            self.read.append(frozenset(read) if run.fused and kept else frozenset())
        self.sources = {key: sources[key] for key in later if key in sources}
        near = [read for run, read in zip(stretch.runs, self.read, strict=True) if run.at < FAR]
        self._near = sorted({key for read in near for key in read})
        self._placed: dict[object, Placed] = {}

    def _kept(self, run: Run, sources: dict[Key, Inside]) -> tuple[tuple[Key, ...], set[Key]]:
        """What a run writes, and what a fused one reads for that."""
        read: set[Key] = set()
        heavy = run.heavy
        if not run.makes or not run.fused:  # what it reads is not asked for
            return run.makes, read
        for key in run.reads:
            if (source := sources.get(key)) is None:
                read.add(key)
            else:
                read |= source.read
                heavy = heavy or source.heavy
        kept = []
        for key in run.makes:
            (here, inside), (after, fits) = self.stretch.reads.get(key, (0, True)), self.later.get(key, (0, True))
            makes = not run.stored and key not in self.stretch.ends and inside and fits
            twice = here + after > 1 and (heavy or len(read) > READS)
            if not makes or twice or len(read) > MOST_READS:
                kept.append(key)
            else:
                sources[key] = Inside(frozenset(read), heavy)
        return tuple(kept), read

    def placed(self, recent: Mapping[Key, Recent], start: int) -> "Placed":
        """Where its kernels run after those of which ``recent`` tells; it begins at ``start``."""
        before = {}
        for key in self._near:
            if (each := recent.get(key)) is not None and (each[0] >= start - FAR or each[1] >= start - FAR):
                before[key] = each[0] - start, each[1] - start, each[2]
        known = tuple(before.items())
        if known not in self._placed:
            self._placed[known] = Placed(self, before)
        return self._placed[known]


class Placed:
    """A stretch of which it is known where its kernels run.

    ``recent`` is what is to be known of it afterwards. ``born`` has where what it writes begins to live, ``last`` the
    last run that reads something, and ``through`` values from which it is read later on, as far as they are.
    """

    def __init__(self, written: Written, before: Mapping[Key, Recent]) -> None:
        self.written, self.stretch = written, written.stretch
        self.at = self._moved(before)
        self.born = {key: at for kept, at in zip(written.kept, self.at, strict=True) for key in kept}
        self.last, self.through = self._last()
        self._divide()
        self._curves: dict[tuple[Event, ...], Curve] = {}

    def _moved(self, before: Mapping[Key, Recent]) -> list[int]:
        """For each run the one in whose kernel it is made: the latest elementwise one before it, if any, that makes
        values of its size and reads one of that size that it reads, too, when all that it reads is there."""
        size, found = self.stretch.size, []
        born = {key: at for key, (at, _, _) in before.items()}
        readers = {key: (at, made) for key, (_, at, made) in before.items()}
        for run, kept, read in zip(self.stretch.runs, self.written.kept, self.written.read, strict=True):
            at = run.at
            if run.fused and kept:
                bytes_ = size(kept[0])
                first = max([run.at - FAR, *(born[key] for key in read if key in born)])
                kernels = (readers[key] for key in read if key in readers and size(key) == bytes_)
                at = max((i for i, made in kernels if i >= first and made == bytes_), default=at)
                readers |= dict.fromkeys(read, (at, bytes_))
            born |= dict.fromkeys(kept, at)
            found.append(at)
        late = self.stretch.length - FAR
        told = {key for key, at in born.items() if at >= late} | {key for key, (at, _) in readers.items() if at >= late}
        self.recent = {key: (born.get(key, NEVER), *readers.get(key, (NEVER, 0))) for key in sorted(told)}
        return found

    def _last(self) -> tuple[dict[Key, int], dict[Key, frozenset[Key]]]:
        later = self.written.later
        last: dict[Key, int] = {}
        through: dict[Key, frozenset[Key]] = {}
        for run, kept, at in zip(self.stretch.runs[::-1], self.written.kept[::-1], self.at[::-1], strict=True):
            reading = at
            if len(kept) < len(run.makes):
                inside = [key for key in run.makes if key not in kept]
                reading = max(last.get(key, NEVER if key in later else run.at) for key in inside)
                reading = max(reading, at) if kept else reading
                if later:
                    further = {key for key in inside if key in later}.union(*(through.get(key, ()) for key in inside))
                    through |= {key: through.get(key, frozenset()) | further for key in run.reads if further}
            for key in run.reads:
                if last.setdefault(key, reading) < reading:
                    last[key] = reading
        return last, through

    def _divide(self) -> None:
        """What lives and dies here whatever comes later is ``_within``, all else ``open`` or made ``outside``."""
        length, ends, later = self.stretch.length, self.stretch.ends, self.written.later
        self.open: list[tuple[Key, int, int]] = []  # with where it begins to live and where it is last read here
        self._within: list[Event] = []
        for key, at in self.born.items():
            last = self.last.get(key, NEVER if key in later else at)
            if key in ends or key in later or key in self.through or at < 0 or not 0 <= last < length:
                self.open.append((key, at, last))
            else:
                self._within += ((at, key, True), (last, key, False))
        self.outside = [(key, self.last.get(key, NEVER)) for key in self.stretch.outside]

    def curve(self, events: tuple[Event, ...]) -> Curve:
        """The bytes that live, with what begins to live or dies here besides."""
        if events not in self._curves:
            self._curves[events] = self._curve(events)
        return self._curves[events]

    def living(self, at: int) -> list[Key]:
        """What lives at a position of what lives and dies here."""
        born = {key for place, key, begins in self._within if begins and place <= at}
        return sorted(born - {key for place, key, begins in self._within if not begins and place < at})

    def _curve(self, events: Sequence[Event]) -> Curve:
        size = self.stretch.size
        makes: dict[int, list[Key]] = {}
        dies: dict[int, list[Key]] = {}
        for at, key, begins in (*self._within, *events):
            (makes if begins else dies).setdefault(at, []).append(key)
        now, highest, where = 0, NEVER, 0
        for run in self.stretch.runs:
            made, ended = makes.get(run.at, ()), dies.get(run.at, ())
            if made:
                now += sum(map(size, made))
            over = 0
            if run.fused and made and ended:
                over = _written_over([size(key) for key in made], [size(key) for key in ended if key not in made])
            if (needed := now - over + run.scratch) > highest:
                highest, where = needed, run.at
            if ended:
                now -= sum(map(size, ended))
        return Curve(highest, where, now)


def _written_over(made: list[int], dead: list[int]) -> int:
    """The bytes that an elementwise kernel writes over what it is the last to read, of the same size."""
    found = 0
    for bytes_ in made:
        if bytes_ in dead:
            dead.remove(bytes_)
            found += bytes_
    return found
