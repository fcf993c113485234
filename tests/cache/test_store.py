"""Plans as files: whole or not there, whoever else writes and whatever became of them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memrewrite.cache import store as stores
from memrewrite.cache.store import Entry, Store

ENTRY = Entry({"about": {"model": "Net", "device": "cpu", "budget": None, "made": "2026-11-25"}, "x": [1, 2]}, b"123")


def test_what_was_put_is_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    assert store.get("key") is None
    assert store.listed() == []
    store.put("key", ENTRY)
    found = store.get("key")
    assert found is not None
    assert found.tensors == b"123"
    assert ENTRY.facts.items() <= found.facts.items()
    assert [(each.key, each.facts) for each in store.listed()] == [("key", ENTRY.facts["about"])]
    assert os.listdir(tmp_path / "a" / "b") == ["key.plan"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"garbage" * 99,
        lambda whole: whole[:-1],
    ],
    ids=["half", "empty", "garbage", "without the last byte"],
)
def test_damage_is_a_miss_and_is_removed(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("key", ENTRY)
    file = tmp_path / "key.plan"
    file.write_bytes(damage(file.read_bytes()))
    assert store.listed() == []
    assert store.get("key") is None
    assert not file.exists()


def test_no_single_bit_is_missed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("key", ENTRY)
    file, right = tmp_path / "key.plan", store.get("key")
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert store.get("key") in (None, right)  # a time, say, tells nothing


def test_a_file_of_another_name_or_version_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.put("key", ENTRY)
    os.rename(tmp_path / "key.plan", tmp_path / "other.plan")
    assert store.get("other") is None
    store.put("key", ENTRY)
    monkeypatch.setattr(stores, "_VERSION", 2)
    assert store.get("key") is None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "plans")
    store.put("key", ENTRY)
    assert store.get("key") is None
    assert store.listed() == []
    (tmp_path / "key.plan").mkdir()
    Store(tmp_path).put("key", ENTRY)
    assert Store(tmp_path).get("key") is None


def test_what_is_too_large_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_LARGEST", 10)
    Store(tmp_path).put("key", ENTRY)
    assert os.listdir(tmp_path) == []


def test_clearing_removes_plans_and_drafts_unread_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    for name in ("one", "two"):
        store.put(name, ENTRY)
    (tmp_path / ".three.plan.4711").write_bytes(b"half")
    (tmp_path / "notes.txt").touch()
    monkeypatch.setattr(Path, "read_bytes", None)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert store.clear() == (2, size)
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert store.clear() == (0, 0)


_WRITER = """
import pathlib
from memrewrite.cache.store import Entry, Store
store = Store(pathlib.Path({folder!r}))
for number in range(60):
    store.put("key", Entry({{"about": {{}}, "n": number}}, bytes([number]) * 50_000))
    found = store.get("key")
    assert found is not None and found.tensors == bytes([found.facts["n"]]) * 50_000
"""


def test_two_processes_write_the_same_entry(tmp_path: Path) -> None:
    code = _WRITER.format(folder=str(tmp_path))
    writers = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [writer.communicate(timeout=120)[1] for writer in writers]
    assert errors == ["", ""]
    assert os.listdir(tmp_path) == ["key.plan"]
