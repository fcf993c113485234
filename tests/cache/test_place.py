"""Where plans lie: the argument before the variable before the user's folder for caches; or nowhere."""

from pathlib import Path
from typing import Any

import pytest

import memrewrite
from memrewrite.cache.place import VARIABLE, folder
from memrewrite.records.errors import UsageError


@pytest.mark.parametrize("word", [None, "", "on", "1"])
def test_the_usual_place_is_the_systems(word: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if word is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, word)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = folder()
    assert found is not None
    assert found.name == "plans"
    assert "memrewrite" in found.parts


@pytest.mark.parametrize("word", ["off", "OFF", "0"])
def test_the_variable_switches_off(word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, word)
    assert folder() is None
    assert folder(True) is None
    assert folder(tmp_path / "new") == tmp_path / "new"


def test_the_variable_names_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    assert folder() == tmp_path / "new"
    assert folder(False) is None


@pytest.mark.parametrize("asked", ["", 3, 1.5, b"x"], ids=repr)
def test_what_is_no_folder_is_refused(asked: Any) -> None:
    with pytest.raises(UsageError, match=r"is no folder; give its path"):
        folder(asked)


def test_a_file_is_refused_wherever_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"The cache is to be in .*, which is not a folder"):
        folder(file)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(UsageError, match=f"^{VARIABLE} is to be in"):
        folder()


def test_a_wrong_place_is_refused_before_anything_runs(tmp_path: Path) -> None:
    import torch

    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a folder"):
        memrewrite.optimize(torch.nn.Linear(2, 2), torch.zeros(0), cache=tmp_path / "file")
