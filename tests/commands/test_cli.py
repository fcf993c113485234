"""The command line: help without torch, defaults from pyproject.toml, what goes to stdout and what to stderr."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memrewrite import cli
from memrewrite.commands import config
from memrewrite.measurement.measuring import Loader
from memrewrite.records.errors import DoesNotFitError, MeasurementError, UsageError
from memrewrite.records.outcomes import Measured

NET = """
import torch
from torch import nn

print("the file speaks")

class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.second = nn.Linear(64, 4)

    def forward(self, x):
        print("the model speaks")
        hidden = self.first(x)
        return self.second(hidden * torch.sigmoid(hidden))

def get_inputs(batch_size=256):
    return torch.randn(batch_size, 8)
"""
SMALL = ["--no-measure", "--no-verify", "-q"]


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model file alone in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_net.py").write_text(NET)
    monkeypatch.delitem(sys.modules, "small_net", raising=False)
    return "small_net.py"


def test_help_does_not_import_torch() -> None:
    for arguments in (["--help"], ["optimize", "--help"], ["estimate", "--help"], ["--version"]):
        code = (
            f"import sys; from memrewrite.cli import run; c = run({arguments}); sys.exit(c or 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


@pytest.mark.parametrize("word", ["with your rights", "get_model", "8GiB", "--no-measure", "pyproject.toml", "130"])
def test_help_says(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", "--help"]) == 0
    assert word in " ".join(capsys.readouterr().out.split())


def test_what_else_would_fit(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, *SMALL, "--budget", "80%", "--advise", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    options = {option["name"]: option for option in report["options"]}
    halved = options["2 micro-batches of 128 with gradient accumulation"]
    assert halved["fits"]
    assert halved["peak_bytes"] <= report["budget"]
    assert options["SGD without momentum (--optimizer sgd)"]["peak_bytes"] < report["predicted_before"]["peak"]
    for more in ([], ["--budget", "80%", "--check"]):
        assert cli.run(["optimize", net, "--advise", *more]) == 2
        assert "--advise says what else would fit a budget" in capsys.readouterr().err


def test_python_m_memrewrite() -> None:
    done = subprocess.run([sys.executable, "-m", "memrewrite", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "optimize" in done.stdout


def test_the_result_on_stdout(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "small_net.py:SmallNet: train step on cpu, no budget" in out
    assert "predicted peak" in out
    assert "swish" in out
    assert "speaks" not in out
    assert "the file speaks" in err


def test_json_on_stdout_is_only_json(net: str) -> None:
    """In a process of its own: what the model prints, there and in measuring children, must not reach stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "memrewrite", "optimize", net, "--json", "-", "--device", "cpu", "--optimizer", "none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert payload["schema_version"] == 1
    assert payload["exit_code"] == 0
    assert payload["command"]["target"] == net
    assert payload["command"]["optimizer"] == "none"
    assert payload["measured_after"]["peak"] > 0
    assert payload["equivalent"] is True


def test_json_in_a_file_beside_the_table(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, *SMALL, "--json", "out.json"]) == 0
    assert "predicted peak" in capsys.readouterr().out
    assert json.loads(Path("out.json").read_text())["model"] == "small_net.py:SmallNet"
    assert sorted({*os.listdir()} - {"__pycache__"}) == ["out.json", "small_net.py"]


@pytest.mark.parametrize(
    ("budget", "code", "word"), [("1GB", 0, "fits"), ("30KB", 1, "does not fit"), ("50%", 1, "does not fit")]
)
def test_check_only_looks(net: str, budget: str, code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, "--check", "--budget", budget, "--json", "-"]) == code
    payload = json.loads(capsys.readouterr().out)
    assert payload["fits"] == (code == 0)
    assert cli.run(["optimize", net, "--check", "--budget", budget]) == code
    assert capsys.readouterr().out.rstrip().endswith(f": {word}")
    assert sorted({*os.listdir()} - {"__pycache__"}) == ["small_net.py"]


def test_diff_shows_what_changed(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, *SMALL, "--diff"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^-.*sigmoid", out, re.MULTILINE)
    assert re.search(r"^\+.*silu", out, re.MULTILINE)


def test_nothing_to_rewrite(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(net).write_text(NET.replace("hidden * torch.sigmoid(hidden)", "hidden"))
    assert cli.run(["optimize", net, *SMALL]) == 0
    assert "Nothing was to rewrite: the model is returned unchanged." in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", ["--exact", "--compiled", "--amp=bf16", "--optimizer=none", "--budget=min", "--passes=swish"]
)
def test_options_reach_the_work(net: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, "--no-measure", "-q", option]) == 0
    assert re.search(r"Equivalence: (bit-equal|equivalent)", capsys.readouterr().out)


def test_an_original_that_does_not_fit_is_said_and_passed(
    net: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memrewrite.commands import optimize

    def measure(loader: Loader, *_: object, **__: object) -> Measured:
        if loader.artifact is None:
            raise DoesNotFitError("The model ran out of memory on cuda:0.")
        return Measured(2_000_000, 2_000_000, 5.0, (), "cuda:0")

    monkeypatch.setattr(optimize, "measure_in_child", measure)
    assert cli.run(["optimize", net, "--no-verify", "--budget", "1MB"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"measured peak +does not fit +2.0 MB", out)
    assert "Note: The original does not fit: The model ran out of memory on cuda:0." in out
    assert "Budget: the measured peak is over by 1.0 MB" in out


def test_what_was_measured_is_in_the_table_and_saved(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, "--budget", "95%", "-o", "out"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"measured peak +\S+", out)
    assert re.search(r"step time .* ms .* ms +x\d", out)
    assert "Budget: the measured peak fits" in out
    assert "Written: out" in out
    assert sorted({*os.listdir()} - {"__pycache__"}) == ["out", "small_net.py"]
    report = json.loads(Path("out/report.json").read_text())
    assert report["measured_after"]["peak"] < report["measured_before"]["peak"]
    assert cli.run(["optimize", net, *SMALL, "-o", "out"]) == 2
    assert json.loads(Path("out/report.json").read_text()) == report
    assert cli.run(["optimize", net, *SMALL, "-o", "out", "--force"]) == 0
    assert json.loads(Path("out/report.json").read_text())["measured_after"] is None


def test_no_folder_is_left_when_measuring_fails(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from memrewrite.commands import optimize

    def measure(*_: object, **__: object) -> Measured:
        raise MeasurementError("The measuring process died.")

    monkeypatch.setattr(optimize, "measure_in_child", measure)
    assert cli.run(["optimize", net, "--no-verify", "-o", "out"]) == 5
    assert sorted({*os.listdir()} - {"__pycache__"}) == ["small_net.py"]


def test_verbose_names_stages_on_stderr(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, "--no-measure", "--no-verify", "-v"]) == 0
    assert re.search(r"^load: \d+\.\d s$", capsys.readouterr().err, re.MULTILINE)


def test_defaults_of_the_project(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text('[tool.memrewrite]\nbatch-size = 32\ninput = ["x=16x8"]\noptimizer = "sgd"\n')
    assert cli.run(["optimize", net, *SMALL, "--json", "-", "--optimizer", "none"]) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert (command["batch_size"], command["input"], command["optimizer"]) == (32, ["x=16x8"], "none")


def test_the_nearest_pyproject_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.memrewrite]\nseed = 3\n")
    assert config.defaults(inner, {"seed": int}) == {"seed": 3}
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert config.defaults(inner, {"seed": int}) == {}


def test_a_folder_is_named_from_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.memrewrite]\ncache = 'plans'\n")
    assert config.defaults(tmp_path / "inner", {"cache": Path}) == {"cache": str(tmp_path / "plans")}


def test_defaults_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(
        UsageError, match=r"pyproject\.toml cannot be read: Permission denied; its \[tool\.memrewrite\] sets"
    ):
        config.defaults(tmp_path, {"seed": int})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[tool.memrewrite]\nbugdet = '8GB'", "unknown option 'bugdet'; did you mean 'budget'"),
        ("[tool.memrewrite]\nforce = true", "unknown option 'force'; known are budget, seed, input"),
        ("[tool.memrewrite]\nbudget = 8", "sets budget to 8; it must be text"),
        ("[tool.memrewrite]\nseed = '1'", "it must be a whole number"),
        ("[tool.memrewrite]\nseed = true", "it must be a whole number"),
        ("[tool.memrewrite]\ninput = 'x=3'", "it must be a list of texts"),
        ("[tool.memrewrite]\ninput = [3]", "it must be a list of texts"),
        ("[tool]\nmemrewrite = 3", "is not a table"),
        ("tool = 3", "is not a table"),
        ("= 3", "is not valid TOML"),
    ],
    ids=[
        "typo",
        "not-configurable",
        "int-for-text",
        "text-for-int",
        "bool-for-int",
        "text-for-list",
        "ints",
        "no-table",
        "no-tools",
        "toml",
    ],
)
def test_wrong_defaults(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        config.defaults(tmp_path, {"budget": str, "seed": int, "input": list})
