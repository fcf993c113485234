"""One number tells whether any of many dictionaries was written to: never too few writes, perhaps too many."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from memrewrite.runtime import dict_versions
from memrewrite.runtime.dict_versions import Clock, _counts

WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an item": lambda d: d.__setitem__("a", 2),
    "a new item": lambda d: d.__setitem__("b", 2),
    "update": lambda d: d.update({"a": 2, "b": 3}),
    "default": lambda d: d.setdefault("c", 2),
    "del": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
}


class Versions:
    """As PyTorch numbers dictionaries since Python 3.12, for the writes that a test makes through it."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.of: dict[int, int] = {}
        self.alive: list[dict[str, Any]] = []  # so that no address comes twice

    def __call__(self, table: dict[str, Any]) -> int:
        self.alive.append(table)
        return self.of.setdefault(id(table), next(self.numbers))

    def write(self, table: dict[str, Any]) -> None:
        self.of[id(table)] = next(self.numbers)


def test_a_moment_ends_with_a_write_and_never_comes_again() -> None:
    versions, table = Versions(), {"a": 1}
    versions(table)
    clock, seen = Clock(versions), []
    for _ in range(5):
        seen.append(clock())
        assert clock() is clock() is seen[-1]
        versions.write(table)
    assert len({id(moment) for moment in seen}) == 5


def test_a_clock_beside_another_sees_too_many_writes_not_too_few() -> None:
    versions, table = Versions(), {"a": 1}
    versions(table)
    one, other = Clock(versions), Clock(versions)
    then = one()
    other()
    assert one() is not then
    then, _ = one(), other()
    versions.write(table)
    assert one() is not then


@pytest.mark.parametrize("odd", ["of each dictionary alone", "of everything", "none"])
def test_numbers_of_another_kind_are_not_relied_upon(odd: str) -> None:
    every = itertools.count(0, 2)
    kinds: dict[str, Callable[[dict[str, Any]], int]] = {
        "of each dictionary alone": len,
        "of everything": lambda table: next(every),
        "none": lambda table: 0,
    }
    assert not _counts(kinds[odd])


@pytest.mark.parametrize("name", WRITES)
def test_pytorch_counts_each_write(name: str) -> None:
    if not isinstance(dict_versions.moment, Clock) or dict_versions.version_of is None:
        pytest.skip("versions without a clock")
    tables = [{"a": 1} for _ in range(50)]
    for table in tables:
        dict_versions.version_of(table)
    for table in tables:
        dict_versions.moment()
        then = dict_versions.moment()
        assert dict_versions.moment() is then
        WRITES[name](table)
        assert dict_versions.moment() is not then
    then = dict_versions.moment()
    thread = threading.Thread(target=lambda: tables[0].__setitem__("x", 1))
    thread.start()
    thread.join()
    assert dict_versions.moment() is not then
