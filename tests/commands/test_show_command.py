"""``memrewrite show`` prints what an artifact holds; it runs nothing of it, and not even PyTorch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memrewrite import cli
from memrewrite.artifact import manifest
from memrewrite.report.read import report_from
from tests.report.test_tables import FULL

# Running any of this would leave a file behind.
CODE = "from pathlib import Path\nPath('it-ran').touch()\nraise SystemExit('it ran')\n"
FACTS: dict[str, Any] = {
    "memrewrite": "0.1.0",
    "model": "nets.[red]Net[/red]\x1b[2J",
    "torch": {"written_with": "2.13.0", "minimum": "2.11"},
    "python": "3.11.7",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    out.mkdir()
    (out / manifest.MODEL).write_text(CODE)
    (out / manifest.REPORT).write_text(json.dumps(FULL.to_json()))
    manifest.write(out, FACTS)
    return out


def test_what_it_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", "out"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for sentence in (
        "out: made by memrewrite 0.1.0, torch 2.13.0, Python 3.11.7",
        r"For nets.[red]Net[/red]\x1b[2J, with torch 2.11 or newer",
        "measured peak 10.00 GB (9.31 GiB) 7.00 GB (6.52 GiB) -30.0 %",
        "Rewrites: swish 2, inplace_activation 1",
        "Checkpoint segments: 2",
        f"Generated code: 3 lines, {len(CODE)} B; not run, not imported",
        "file bytes SHA-256, as in the manifest",
        f"{manifest.MODEL} {len(CODE)} ",
    ):
        assert sentence in out, sentence
    assert cli.run(["show", "out", "-v"]) == 0
    assert "conv1 .. conv2" in capsys.readouterr().out


def test_nothing_is_run_or_imported(folder: Path) -> None:
    code = (
        "import sys; from memrewrite.cli import run; code = run(['show', 'out', '-v']); "
        "sys.exit(code or 'torch' in sys.modules or any('memrewrite_model' in name for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert not Path("it-ran").exists()
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        [manifest.MANIFEST, manifest.MODEL, manifest.REPORT]
    )


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", "out", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["manifest"] == manifest.read(folder)
    assert found["code"] == {"bytes": len(CODE), "lines": 3}
    assert found["report"] == json.loads(json.dumps(FULL.to_json()))
    assert (found["schema_version"], found["exit_code"], found["command"]["artifact"]) == (1, 0, "out")


def test_without_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / manifest.REPORT).unlink()
    manifest.write(folder, {})
    assert cli.run(["show", "out"]) == 0
    assert "Generated code: 3 lines" in capsys.readouterr().out


def spoil_model(out: Path) -> None:
    (out / manifest.MODEL).write_text(CODE + "\n")


def spoil_report(out: Path) -> None:
    (out / manifest.REPORT).write_text('{"model": 3}')
    manifest.write(out, FACTS)


def remove_manifest(out: Path) -> None:
    (out / manifest.MANIFEST).unlink()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_model, "memrewrite_model.py is not what was written (its SHA-256 differs)"),
        (spoil_report, "report.json is not a report as this memrewrite writes it"),
        (remove_manifest, "out is no artifact of memrewrite: it holds no manifest.json"),
    ],
)
def test_a_folder_that_is_not_as_written(
    folder: Path, spoil: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    assert cli.run(["show", "out"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err


def test_a_report_comes_back_as_it_was() -> None:
    assert report_from(json.loads(json.dumps(FULL.to_json()))) == FULL


@pytest.mark.parametrize(
    "change",
    [{"budget": "8GB"}, {"rewrites": [["swish", "act"]]}, {"segments": [{"first": "a"}]}, {"predicted_after": None}],
    ids=["type", "tuple", "field", "missing"],
)
def test_json_that_is_no_report(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        report_from({**FULL.to_json(), **change})
