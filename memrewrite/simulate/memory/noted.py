"""What operators did to storages, as they ran, in numbers, to be counted again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memrewrite.simulate.memory.counted import Birth, Counted, Ran, Stand, by_cublas
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.transients import NOTHING, Taken


@dataclass(frozen=True, slots=True)
class Did:
    """An operator: the bytes of each storage it made, and what it took; ``added`` to a storage it was in place.

    ``place`` is as in ``Ran``.
    """

    func: Any
    made: tuple[int, ...]
    taken: Taken
    added: int | None
    place: str | None


@dataclass(frozen=True)
class InNumbers:
    """Operators, the numbers of storages that ended, and what else is noted, in order.

    ``numbers`` are those of storages by their ids, ``living`` those that did not end.
    """

    entries: tuple[Did | int | Any, ...]
    numbers: dict[int, int]
    living: set[int]


def in_numbers(log: Sequence[Any]) -> InNumbers | None:
    """What happened; None where that is more than storages that come and go."""
    numbers: dict[int, int] = {}
    known: dict[Any, Did] = {}
    entries: list[Any] = []
    living: set[int] = set()
    for entry in log:
        if isinstance(entry, str):
            entries.append(entry)
        elif isinstance(entry, Counted):
            if (number := numbers.get(id(entry))) is None:  # it was there before
                return None
            living.remove(number)
            entries.append(number)
        elif not isinstance(entry, Ran) or (entry.added is not None and id(entry.added) not in numbers):
            return None
        elif entry.made or _takes(entry.taken) or by_cublas(entry.func):  # else it does nothing to what is counted
            added = None if entry.added is None else numbers[id(entry.added)]
            living.discard(-1 if added is None else added)
            for block in entry.made:
                numbers[id(block)] = number = len(numbers)
                living.add(number)
            made = tuple([block.nbytes for block in entry.made])
            asked = id(entry.func), made, id(entry.taken), added, entry.place
            if (did := known.get(asked)) is None:
                did = known[asked] = Did(entry.func, made, entry.taken, added, entry.place)
            entries.append(did)
    return InNumbers(tuple(entries), numbers, living)


def _takes(taken: Taken) -> bool:
    return taken is not NOTHING and taken != NOTHING


def count_again(did: Did, first: int, storages: dict[int, Any], there: dict[int, Any], trackers: list[Tracker]) -> None:
    """Let the trackers count what it did once more.

    What it makes is numbered from ``first`` on: one of ``storages``, or what stands for it. ``there`` are those that
    are held now.
    """
    new = range(first, first + len(did.made))
    there.update((number, storages.get(number) or Stand()) for number in new)
    births = [Birth(there[number], size, False) for number, size in zip(new, did.made, strict=True)]
    added = None if did.added is None else there[did.added]
    for tracker in trackers:
        tracker.repeat(did.func, births, did.taken, added, did.place)
    if did.added is not None:
        del there[did.added]
