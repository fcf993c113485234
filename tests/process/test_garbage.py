"""Garbage is sought seldom while plans are made, and as before afterwards."""

import contextlib
import gc
import weakref
from unittest.mock import Mock

import pytest
import torch.distributed

from memrewrite.process import garbage
from memrewrite.process.garbage import not_sought, sought_as_before, sought_seldom


@pytest.mark.parametrize(("before", "within"), [((700, 10, 10), (700, 10, 1000)), ((500, 5, 2000), (500, 5, 2000))])
def test_all_objects_are_looked_through_seldom_until_it_ends(
    before: tuple[int, int, int], within: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "_OTHERS", [])
    usual = gc.get_threshold()
    gc.set_threshold(*before)
    gc.unfreeze()  # what the tests put aside
    try:
        with contextlib.suppress(ZeroDivisionError), sought_seldom():
            assert gc.get_threshold() == within
            assert gc.get_freeze_count() > 0
            with sought_seldom(), sought_as_before():
                assert gc.get_threshold() == before
            assert gc.get_threshold() == within
            raise ZeroDivisionError
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() == 0
        with sought_as_before():
            assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*usual)
        gc.freeze()


@pytest.mark.parametrize("several", [False, True])
def test_what_is_there_before_large_things_are_made_is_looked_through_once(
    several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node:
        """One that a cycle keeps."""

    monkeypatch.setattr(garbage, "_OTHERS", [])
    gc.unfreeze()  # what the tests put aside
    try:
        old = Node()
        old.itself = old  # type: ignore[attr-defined]
        gone = weakref.ref(old)
        with sought_seldom():
            del old
            assert gone() is not None
            monkeypatch.setattr(torch.distributed, "is_initialized", lambda: several)
            with sought_as_before():
                assert (gone() is None) == (not several)
                assert (gc.get_freeze_count() > 0) == (not several)
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_what_others_put_aside_stays_there_and_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_OTHERS", [])
    gc.freeze()  # as the tests do
    count = gc.get_freeze_count
    counted = Mock(side_effect=count)
    monkeypatch.setattr(gc, "get_freeze_count", counted)
    for _ in range(2):
        with sought_seldom(), sought_as_before():
            assert count() > 0
        assert count() > 0
    counted.assert_called_once()


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_sought_in_a_search_and_afterwards_as_before(enabled: bool) -> None:
    usual = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ZeroDivisionError), not_sought():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if usual else gc.disable)()
