"""Saving leaves a whole artifact or nothing, whatever happens, and nothing of the user's is lost."""

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import nn

from memrewrite.artifact import manifest
from memrewrite.artifact.load import load
from memrewrite.artifact.save import save
from memrewrite.records.attached import report_of
from memrewrite.records.errors import NotEquivalentError, OutputError, UsageError
from tests.support.artifacts import listing, net, optimized, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model's file, and its artifact in ``out``."""
    yield from written(tmp_path_factory.mktemp("artifact"))


@pytest.fixture(scope="module")
def rewritten(folder: Path) -> nn.Module:
    """One rewritten model for tests that only save it."""
    return optimized()


@pytest.fixture
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``folder`` to spoil, as the current folder."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_existing_folder_is_kept_unless_forced(here: Path, rewritten: nn.Module) -> None:
    with pytest.raises(UsageError, match="out exists already; give another folder, or force"):
        save(rewritten, "out")
    before = listing(here)
    (here / "out" / "report.html").write_text("old")
    (here / "out" / "weights.safetensors").write_text("old")
    save(rewritten, "out", force=True)
    assert listing(here) == before
    assert "weights.safetensors" not in listing(here / "out")
    assert (here / "out" / "report.html").read_text() != "old"
    assert load("out", net())


def keep_notes(place: Path) -> None:
    (place / "out" / "notes.txt").write_text("mine")


def be_a_file(place: Path) -> None:
    shutil.rmtree(place / "out")
    (place / "out").write_text("mine")


def be_a_link(place: Path) -> None:
    (place / "out").rename(place / "real")
    (place / "out").symlink_to(place / "real")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (keep_notes, "out holds notes.txt, which memrewrite did not write"),
        (be_a_file, "out is not a folder"),
        (be_a_link, "out is not a folder"),
    ],
    ids=["foreign-file", "file", "link"],
)
def test_force_removes_nothing_of_the_users(
    here: Path, rewritten: nn.Module, spoil: Callable[[Path], None], sentence: str
) -> None:
    spoil(here)
    before = listing(here)
    with pytest.raises(UsageError, match=sentence):
        save(rewritten, "out", force=True)
    assert listing(here) == before


def test_what_cannot_be_saved(here: Path, rewritten: nn.Module) -> None:
    with pytest.raises(UsageError, match="not a rewritten one"):
        save(net(), "new")
    with pytest.raises(UsageError, match="made by an artifact"):
        save(load("out", net()), "new")
    with pytest.raises(UsageError, match=r"There is no folder .*missing to put"):
        save(rewritten, "missing/new")


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "where",
    [(Path, "write_text"), (Path, "write_bytes"), (os, "replace"), (Path, "mkdir")],
    ids=lambda where: where[1],
)
@pytest.mark.parametrize("force", [False, True], ids=["new", "existing"])
def test_a_full_disk_leaves_all_as_it_was(
    here: Path, rewritten: nn.Module, where: tuple[Any, str], force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "out" if force else "new"
    before = [listing(here), listing(here / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(*where, full_disk)
        with pytest.raises(UsageError, match=f"{target} cannot be written: No space left on device; nothing was"):
            save(rewritten, target, force=force)
    assert [listing(here), listing(here / "out")] == before
    assert load("out", net())


def test_a_disk_that_is_full_of_weights(here: Path, rewritten: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    before = listing(here)
    monkeypatch.setattr(safetensors.torch, "save_model", full)
    with pytest.raises(OutputError, match=r"weights\.safetensors cannot be written: .*: No space left on device"):
        save(rewritten, "new", weights=True)
    assert listing(here) == before


def test_what_may_not_be_written_is_told_before_all_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def access(place: Path, way: int, *, closed: Path) -> bool:
        return not (place == closed and way & os.W_OK)

    (tmp_path / "out").mkdir()
    for closed, name, sentence in [
        (tmp_path, "new", "new cannot be written, as its folder may not be; give another folder."),
        (tmp_path / "out", "out", "out may not be replaced; give another folder, or make it writable."),
    ]:
        monkeypatch.setattr(os, "access", functools.partial(access, closed=closed))
        with pytest.raises(UsageError, match=sentence):
            manifest.check_place(tmp_path / name, force=True)


def test_an_interrupted_move_puts_the_old_folder_back(
    here: Path, rewritten: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = listing(here), os.replace
    calls: list[Any] = []

    def replace_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        save(rewritten, "out", force=True)
    assert listing(here) == before
    assert load("out", net())


@pytest.mark.parametrize("error", [NotEquivalentError("no"), KeyboardInterrupt(), RuntimeError("crash")], ids=repr)
def test_a_failed_check_leaves_nothing(here: Path, rewritten: nn.Module, error: BaseException) -> None:
    seen: list[Path] = []

    def check(draft: Path) -> None:
        seen.append(draft)
        assert load(draft, net())
        raise error

    before = listing(here)
    with pytest.raises(type(error)):
        save(rewritten, "new", check=check)
    assert listing(here) == before
    assert seen[0].parent == here
    assert seen[0].name.startswith(".new.tmp-")


def test_the_report_of_the_check_is_the_one_written(here: Path, rewritten: nn.Module) -> None:
    report = report_of(rewritten)
    save(rewritten, "new", check=lambda draft: replace(report, model="as measured"))
    manifest.read(Path("new"))
    assert json.loads(Path("new/report.json").read_text())["model"] == "as measured"
