"""``memrewrite verify``: a saved artifact against its target, in a fresh process, by group of values."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memrewrite import cli
from memrewrite.artifact import manifest, recheck
from memrewrite.commands import measure_child
from tests.support.artifacts import written
from tests.support.schema import assert_answer

NET = "artifact_net.py:ArtifactNet"
OPTIONS = ["--optimizer", "sgd", "--device", "cpu", "-q"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from written(tmp_path_factory.mktemp("verified"))


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_artifact_that_is_as_proved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "out", NET, *OPTIONS, "--json", "found.json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    assert_answer("verify", found)
    assert (found["equivalent"], found["batch"], found["exit_code"]) == (True, 8, 0)
    assert found["files"] == manifest.read(Path("out"))["files"]
    checks = {check["group"]: check for check in found["checks"]}
    assert checks.keys() >= {"output", "loss", "gradient", "input gradient", "buffer", "random state"}
    assert all(check["passed"] for check in checks.values())
    assert checks["random state"]["bit_equal"] == checks["random state"]["count"] > 0
    assert f"out against {NET}: train step on cpu" in out
    assert re.search(r"values +bit-equal +worst error +original's own +allowed +verdict", out)
    gradient = checks["gradient"]
    assert re.search(rf"^gradient +{gradient['bit_equal']} of {gradient['count']} .*same", out, re.MULTILINE)
    assert re.search(rf"^memrewrite_model.py +{found['files'][manifest.MODEL][:16]}", out, re.MULTILINE)
    assert "Verdict: equivalent" in out


def test_an_artifact_that_computes_something_else(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(job: dict[str, Any], timeout_s: float) -> Any:
        return json.loads(json.dumps(measure_child.JOBS[job["kind"]](job)))

    monkeypatch.setattr(recheck, "run_job", in_this_process)
    code = Path("out") / manifest.MODEL
    code.write_text(code.read_text().replace("aten.tanh", "aten.sin"))
    manifest.write(Path("out"), {"torch": {}})
    assert cli.run(["verify", "out", NET, *OPTIONS, "--exact"]) == 4
    out = capsys.readouterr().out
    assert re.search(r"^output .* differs *$", out, re.MULTILINE)
    assert re.search(r"^random state .* same *$", out, re.MULTILINE)
    assert "Verdict: not equivalent: " in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no", NET], "no is no artifact of memrewrite"),
        (["out", NET, "--device", "gpu"], "Device 'gpu' is not supported"),
        (["out"], "Missing argument 'TARGET'. See memrewrite verify --help."),
    ],
    ids=["artifact", "device", "missing"],
)
def test_wrong_use(here: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", *arguments, "-q"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err


def test_a_changed_file_is_found_before_anything_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (Path("out") / manifest.MODEL).open("a") as code:
        code.write("\n")
    Path("fails.py").write_text("raise RuntimeError('it ran')")
    assert cli.run(["verify", "out", "fails.py"]) == 2
    assert "memrewrite_model.py is not what was written" in capsys.readouterr().err
