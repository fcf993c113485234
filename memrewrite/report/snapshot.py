"""Predicted timelines as a memory snapshot of CUDA, for https://pytorch.org/memory_viz to show every allocation.

The structure is that of ``torch.cuda.memory._snapshot()``: ``device_traces`` lists what was allocated and freed, and
``segments`` what is there at the end. There is no allocator here, so every timeline gets one segment, in which each
storage lies at the first place that is free and large enough, and time counts events; what operators take only while
they run is not in it. The viewer reads pickles of protocol 4 with plain data only, and looks for a category "unknown"
wherever there are categories.
"""

import pickle
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memrewrite.report.text import module_name
from memrewrite.simulate import WORKSPACES, Life, Timeline

BASE = 0x7F00_0000_0000
"""Where the first segment begins; CUDA's lie about there."""
_ROOM = 1 << 42  # addresses of each device, far more than there is memory

_DEATH, _BIRTH, _EARLY_DEATH = range(3)  # the last of what does not outlive the operator that makes it


def to_pickle(timelines: Sequence[Timeline]) -> bytes:
    """The snapshot as memory_viz reads it: one device for each timeline, in order."""
    return pickle.dumps(snapshot(timelines), protocol=4)


def snapshot(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The snapshot as plain data."""
    devices = [_device(number, timeline) for number, timeline in enumerate(timelines)]
    return {"segments": [segment for segment, _ in devices], "device_traces": [trace for _, trace in devices]}


def _device(number: int, timeline: Timeline) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The segment and the trace of one timeline, whose storages are all there is."""
    lives = [life for life in (*_libraries(timeline), *timeline.lives) if life.bytes]
    base = BASE + number * _ROOM
    arena = _Arena(base)
    trace: list[dict[str, Any]] = []
    entries: dict[int, dict[str, Any]] = {}
    for event, order, index in _happenings(lives, len(timeline.events)):
        life = lives[index]
        if order == _BIRTH:
            entries[index] = {
                "addr": arena.take(life.bytes),
                "size": life.bytes,
                "stream": 0,
                "frames": _frames(life),
                "category": life.category,
            }
            trace.append({"action": "alloc", **entries[index], "time_us": event})
            continue
        entry = entries.pop(index)
        arena.give_back(entry["addr"], life.bytes)
        trace += [{"action": action, **entry, "time_us": event} for action in ("free_requested", "free_completed")]
    end = {"addr": base, "size": 0, "stream": 0, "frames": [], "category": "unknown", "time_us": len(timeline.events)}
    trace.append({"action": "snapshot", **end})
    return _segment(number, base, arena.top, list(entries.values())), trace


def _happenings(lives: Sequence[Life], end: int) -> list[tuple[int, int, int]]:
    """(event, order, index of the storage), sorted: at one event old storages die, then new ones are born."""
    births = [(life.born, _BIRTH, index) for index, life in enumerate(lives)]
    deaths = [(life.died, _DEATH if life.died > life.born else _EARLY_DEATH, i) for i, life in enumerate(lives)]
    return sorted(births + [death for death in deaths if death[0] < end])


def _libraries(timeline: Timeline) -> Iterable[Life]:
    """What libraries hold throughout, as one storage."""
    size = timeline.categories.get(WORKSPACES, 0)
    return [Life(0, len(timeline.events), size, WORKSPACES, None, WORKSPACES)] if size else []


def _frames(life: Life) -> list[dict[str, Any]]:
    """As a stack: the operator and phase, then the submodule and each one around it."""
    frames = [{"filename": life.category, "line": 0, "name": life.operator}]
    return frames + [{"filename": "module", "line": 0, "name": path} for path in _around(life.module)]


def _around(path: str | None) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield module_name(path)


def _segment(number: int, base: int, top: int, live: list[dict[str, Any]]) -> dict[str, Any]:
    """One segment with what is there at the end, and the gaps between."""
    blocks: list[dict[str, Any]] = []
    address = base
    for entry in sorted(live, key=lambda entry: entry["addr"]):
        if entry["addr"] > address:
            blocks.append(_gap(address, entry["addr"]))
        blocks.append(
            {
                "address": entry["addr"],
                "size": entry["size"],
                "requested_size": entry["size"],
                "state": "active_allocated",
                "frames": entry["frames"],
            }
        )
        address = entry["addr"] + entry["size"]
    if address < top:
        blocks.append(_gap(address, top))
    used = sum(entry["size"] for entry in live)
    return {
        "device": number,
        "address": base,
        "total_size": top - base,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "frames": [],
        "blocks": blocks,
    }


def _gap(start: int, end: int) -> dict[str, Any]:
    return {"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}


class _Arena:
    """Addresses from ``base`` on; ``top`` is the end of what was ever in use."""

    def __init__(self, base: int) -> None:
        self.top = base
        self._holes: list[tuple[int, int]] = []  # (start, end), in order, none touching another

    def take(self, size: int) -> int:
        """The first address with ``size`` free bytes."""
        for index, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        start = self.top
        if self._holes and self._holes[-1][1] == self.top:  # the last hole grows
            start, _ = self._holes.pop()
        self.top = start + size
        return start

    def give_back(self, start: int, size: int) -> None:
        """Make ``size`` bytes at ``start`` free again."""
        insort(self._holes, (start, start + size))
        merged: list[tuple[int, int]] = []
        for hole in self._holes:
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = merged[-1][0], hole[1]
            else:
                merged.append(hole)
        self._holes = merged
