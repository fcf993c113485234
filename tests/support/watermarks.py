"""The most bytes that live while runs follow each other, in one pass over all of them: what stretches have to tell."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from memrewrite.backends.stretches import FAR, MOST_READS, READS, Key, Run

Size = Callable[[Key], int]


def watermark(runs: Sequence[Run], given: Iterable[Key], ends: Iterable[Key], size: Size) -> tuple[int, list[Key]]:
    """The most bytes and what then lives; ``given`` is there at first, what ``ends`` names until the end."""
    stays = {*ends}
    written, sources = _written(runs, stays)
    at = _moved(runs, written, sources, size)
    last = {**dict.fromkeys(given, -1), **_last(runs, written, at)}
    living = {*given}
    best, there = sum(map(size, living)), sorted(living)
    living -= {key for key in living - stays if last[key] < 0}
    for run in runs:
        made = {key for i, each in enumerate(runs) if at[i] == run.at for key in each.makes if key in written}
        living |= made
        ended = {key for key in living if last[key] == run.at and key not in stays}
        dead = [size(key) for key in ended - made]
        over = 0
        for bytes_ in (size(key) for key in made if run.fused):
            if bytes_ in dead:
                dead.remove(bytes_)
                over += bytes_
        if (needed := sum(map(size, living)) - over + run.scratch) > best:
            best, there = needed, sorted(living)
        living -= ended
    return best, there


def _written(runs: Sequence[Run], stays: set[Key]) -> tuple[set[Key], dict[Key, set[Key]]]:
    """What is written, and of what each other value is made, which is read in its place."""
    sources: dict[Key, set[Key]] = {}
    written: set[Key] = set()
    heavy: set[Key] = set()
    for run in runs:
        read = _read(run, sources)
        weighs = run.heavy or not heavy.isdisjoint(run.reads)
        for key in run.makes:
            readers = [each for each in runs for other in each.reads if other == key]
            inside = run.fused and key not in stays and all(each.reader for each in readers)
            if not inside or (len(readers) > 1 and (weighs or len(read) > READS)) or len(read) > MOST_READS:
                written.add(key)
                continue
            sources[key] = read
            heavy |= {key} if weighs else set()
    return written, sources


def _read(run: Run, sources: Mapping[Key, set[Key]]) -> set[Key]:
    return {each for key in run.reads for each in sources.get(key, {key})}


def _moved(runs: Sequence[Run], written: set[Key], sources: Mapping[Key, set[Key]], size: Size) -> list[int]:
    """The run in whose kernel each is made."""
    found: list[int] = []
    born: dict[Key, int] = {}
    readers: dict[Key, tuple[int, int]] = {}
    for run in runs:
        at, kept, read = run.at, [key for key in run.makes if key in written], _read(run, sources)
        if run.fused and kept:
            bytes_ = size(kept[0])
            first = max([run.at - FAR, *(born.get(key, -1) for key in read)])
            kernels = [readers[key] for key in read if key in readers and size(key) == bytes_]
            at = max((i for i, made in kernels if i >= first and made == bytes_), default=at)
            readers |= dict.fromkeys(read, (at, bytes_))
        born |= dict.fromkeys(kept, at)
        found.append(at)
    return found


def _last(runs: Sequence[Run], written: set[Key], at: Sequence[int]) -> dict[Key, int]:
    """The last run that reads each value, through others that are made where they are read."""
    last: dict[Key, int] = {}
    for run, place in zip(runs[::-1], at[::-1], strict=True):
        inside = [last.get(key, run.at) for key in run.makes if key not in written]
        reading = max(inside) if inside and len(inside) == len(run.makes) else max([place, *inside])
        for key in run.reads:
            last[key] = max(last.get(key, -1), reading)
    for run, place in zip(runs, at, strict=True):
        for key in run.makes:
            last.setdefault(key, place)
    return last
