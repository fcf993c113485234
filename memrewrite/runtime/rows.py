"""Rows of things that guards compare, whole lists at a time by C code. Torch only; part of every artifact."""

import gc
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memrewrite.runtime.differences import ABSENT, another_class, another_dictionary, joined


@dataclass
class Row:
    """Things of one kind: what ``now`` lists is compared with what it listed ``then``, first of all by identity.

    ``labels`` names each; ``reason(label, then, now)`` says of a pair that is not one object what has changed, "" if
    nothing has that matters. ``live`` lists the same where ``now`` makes copies. ``watched`` says that all of it lies
    in dictionaries whose versions are compared, ``timed`` that it lies in such as make another moment when they change,
    ``identical`` that nothing less than the same objects will do.
    """

    now: Callable[[], list[Any]]
    labels: Callable[[], Iterable[str]]
    reason: Callable[[str, Any, Any], str]
    live: Callable[[], list[Any]] | None = None
    watched: bool = False
    timed: bool = False
    identical: bool = False
    then: list[Any] = field(default_factory=list)

    def holds(self) -> bool:
        """Whether nothing has changed, as far as one comparison tells."""
        now = (self.live or self.now)()
        return all(map(operator.is_, now, self.then)) if self.identical else now == self.then

    def changes(self) -> Iterator[str]:
        """What has changed, a phrase each."""
        pairs = itertools.zip_longest(self.then, self.now(), fillvalue=ABSENT)
        labels = itertools.chain(self.labels(), itertools.repeat("a part of it"))
        for label, (then, now) in zip(labels, pairs, strict=False):
            if then is not now and (reason := self.reason(label, then, now)):
                yield reason


def bodies(owners: list[tuple[str, Any]]) -> Iterator[Row]:
    """Of what class the owners are, and which dictionary has their attributes: another one is watched by nobody.

    The collector of garbage tells both in one call, of all owners whose attributes lie nowhere else; else, as where
    Python 3.13 has them inside of the object, each is asked.
    """
    plain = [(label, owner) for label, owner in owners if _of_two(owner)]
    others = [(label, owner) for label, owner in owners if not _of_two(owner)]
    at_once, found = tuple(owner for _, owner in plain), list[Any]()

    def parts() -> list[Any]:
        nonlocal found
        found = gc.get_referents(*at_once)
        return found

    each = [_dictionaries(plain), _types(plain)]
    flat = itertools.chain.from_iterable

    def labels() -> Iterable[str]:
        return flat(zip(*(row.labels() for row in each), strict=True))

    yield Row(lambda: [*flat(zip(*(row.now() for row in each), strict=True))], labels, _another_part, parts)
    yield _dictionaries(plain, lambda: found[::2])  # of the row before, to which equal ones are the same
    yield _types(others)
    yield _dictionaries([(label, owner) for label, owner in others if _has_one(owner)])


def _types(owners: list[tuple[str, Any]]) -> Row:
    labels, each = [label for label, _ in owners], [owner for _, owner in owners]
    return Row(lambda: [*map(type, each)], lambda: labels, another_class)


def _dictionaries(owners: list[tuple[str, Any]], live: Callable[[], list[Any]] | None = None) -> Row:
    labels, each = [joined(label, "__dict__") for label, _ in owners], [owner for _, owner in owners]
    get = operator.attrgetter("__dict__")
    return Row(lambda: [*map(get, each)], lambda: labels, another_dictionary, live, identical=True)


def _another_part(label: str, then: Any, now: Any) -> str:
    return (another_class if isinstance(then, type) else another_dictionary)(label, then, now)


def _has_one(owner: Any) -> bool:
    """Whether its attributes lie in a dictionary; those of a class, say, are shown in another view each time."""
    return isinstance(getattr(owner, "__dict__", None), dict) and owner.__dict__ is owner.__dict__


def _of_two(owner: Any) -> bool:
    """Whether an object consists of its dictionary and its class, for the collector of garbage."""
    parts = gc.get_referents(owner)
    return _has_one(owner) and len(parts) == 2 and parts[0] is owner.__dict__ and parts[1] is type(owner)
