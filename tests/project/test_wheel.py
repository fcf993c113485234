"""The wheel holds every package, and nothing at its top but ours."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("memrewrite", "passes", "pyproject.toml", "README.md", "LICENSE")


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.parent for file in (ROOT / "memrewrite").rglob("__init__.py")} | {ROOT / "memrewrite" / "passes"}
    assert sorted(listed) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)


@pytest.mark.skipif(not importlib.util.find_spec("build"), reason="needs build")
@pytest.mark.skipif(not importlib.util.find_spec("setuptools"), reason="needs setuptools, as nothing is downloaded")
def test_what_the_wheel_holds(tmp_path: Path) -> None:
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("memrewrite-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    code = {f"memrewrite/{file.relative_to(ROOT / 'memrewrite')}" for file in (ROOT / "memrewrite").rglob("*.py")}
    code |= {f"memrewrite/passes/{file.name}" for file in (ROOT / "passes").glob("*.py")}
    assert code <= names
    assert "memrewrite/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"memrewrite"}
    (entry,) = (name for name in names if name.endswith("entry_points.txt"))
    with zipfile.ZipFile(wheel) as opened:
        assert "memrewrite = memrewrite.cli:entry_point" in opened.read(entry).decode()
