"""What cannot be meant is refused before PyTorch is imported; what cannot be written is told, with an exit code."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import nn

import memrewrite
from memrewrite import cli
from memrewrite.records.errors import OutputError, UsageError
from memrewrite.records.options import PASSES
from memrewrite.report.writing import fill
from memrewrite.search import registry
from memrewrite.workload.input_text import InputText
from memrewrite.workload.inputs import RandomInput
from memrewrite.workload.place import Source
from memrewrite.workload.stepspec import AMP, OPTIMIZERS, amp_dtype, optimizer_factory

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)

def get_inputs():
    return torch.ones(4, 8)
"""
# Exit code and whether torch was imported, of one command line that has the process to itself.
ALONE = """
import sys
from memrewrite.cli import run
code = run(sys.argv[1:])
print("REPORT", code, "torch" in sys.modules)
"""
FULL = Path("/dev/full")
NO_SPACE = r"memrewrite: Standard output cannot be written: No space left on device.*\.\n"

EARLY: dict[str, tuple[list[str], str]] = {
    "budget": (["optimize", "good.py", "--budget", "8Gb"], "has no known unit"),
    "negative budget": (["optimize", "good.py", "--budget", "-5GB"], "Budget '-5GB' must be more than zero"),
    "check min": (["optimize", "good.py", "--check", "--budget", "min"], "--check needs a budget in bytes"),
    "file": (["optimize", "god.py"], "There is no file god.py; did you mean"),
    "target": (["measure", "good"], "names no model"),
    "input": (["optimize", "good.py", "--input", "8x8:flaot32"], "unknown dtype 'flaot32'; did you mean 'float32'"),
    "size": (["optimize", "good.py", "--input", "0x8"], "has a size of zero"),
    "optimizer": (["optimize", "good.py", "--optimizer", "adamx"], "Optimizer 'adamx' is unknown"),
    "factory": (["optimize", "good.py", "--optimizer", ":f"], "The optimizer ':f' is not of the form"),
    "loss": (["optimize", "good.py", "--loss", "mse"], "The loss 'mse' is not of the form module:function"),
    "amp": (["optimize", "good.py", "--amp", "fp8"], "Invalid value for '--amp'"),
    "mode": (["estimate", "good.py", "--mode", "trian"], "Invalid value for '--mode'"),
    "seed": (["optimize", "good.py", "--seed", "9" * 20], "Seed 99999999999999999999 is out of range"),
    "negative seed": (["measure", "good.py", "--seed", str(-(2**63) - 1)], "is out of range"),
    "passes": (["optimize", "good.py", "--passes", "swish,swich"], "There is no pass 'swich'"),
    "dynamic": (["optimize", "good.py", "--dynamic", "x:1=8..4"], "Range x:1=8..4 ends before it begins"),
    "device": (["optimize", "good.py", "--device", "tpu"], "Device 'tpu' is not supported"),
    "folder": (["optimize", "good.py", "-o", "."], ". exists already"),
    "no parent": (["optimize", "good.py", "-o", "no/such"], "There is no folder"),
    "memory": (["estimate", "good.py", "--device-memory", "60%"], "is no number of bytes"),
    "memory of no device": (["estimate", "good.py", "--device-memory", "9" * 400 + "GB"], "more than any device has"),
    "folder as a target": (["estimate", "folder.py"], "folder.py is a folder; give path/model.py[:attr]"),
    "folder as a report": (["optimize", "good.py", "--report", "folder.py"], "is a folder; name a file for --report"),
    "folder as JSON": (["estimate", "good.py", "--json", "folder.py"], "folder.py is a folder; name a file for JSON"),
    "one file for two": (["optimize", "good.py", "--png", "a", "--report", "a"], "--report and --png are both a; name"),
    "report in the output": (
        ["optimize", "good.py", "-o", "o", "--report", "o/r.html"],
        "o/r.html would lie in o",
    ),
    "JSON in the output": (
        ["optimize", "good.py", "-o", "o", "--json", "o/r.json"],
        "file elsewhere for --json",
    ),
    "JSON over the model": (["estimate", "good.py", "--json", "./good.py"], "good.py is the model's own file"),
    "report over the model": (["optimize", "good.py:Net", "--report", "good.py"], "name another one for --report"),
    "plot over the model": (
        ["measure", "good.svg.py", "--batch-sizes", "1,2", "--plot", "good.svg"],
        "model's own file",
    ),
    "endless timeout": (["optimize", "good.py", "--timeout", "inf"], "inf is not a number of seconds above 0"),
    "timeout of weeks": (["measure", "good.py", "--timeout", "1e7"], "1e+07 is not a number of seconds"),
    "no timeout": (["verify", ".", "good.py", "--timeout", "nan"], "nan is not a number of seconds above 0"),
    "no cache": (["optimize", "good.py", "--cache", ""], "The cache '' is no folder; give its path"),
    "one file for plot and JSON": (
        ["measure", "good.py", "--batch-sizes", "1,2", "--plot", "a.png", "--json", "a.png"],
        "--plot and --json are both a.png; name",
    ),
    "JSON in what is shown": (["show", "art", "--json", "art/report.json"], "art/report.json would lie in art"),
    "JSON in what is verified": (["verify", "art", "good.py", "--json", "art/manifest.json"], "elsewhere for --json"),
    "JSON in what is measured": (["measure", "good.py", "--artifact", "art", "--json", "art/a"], "would lie in art"),
    "plot in what is measured": (
        ["measure", "good.py", "--artifact", "art", "--batch-sizes", "1,2", "--plot", "art/a.png"],
        "elsewhere for --plot",
    ),
    "artifact": (["show", "nothing"], "is no artifact of memrewrite"),
    "artifact to verify": (["verify", ".", "good.py"], "is no artifact of memrewrite"),
    "artifact to measure": (["measure", "good.py", "--artifact", "."], "is no artifact of memrewrite"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "good", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", EARLY)
def test_a_wrong_option_needs_no_torch(name: str, folder: Path) -> None:
    arguments, sentence = EARLY[name]
    (folder / "folder.py").mkdir()
    (folder / "art").mkdir()
    (folder / "art" / "manifest.json").write_text("{}")
    (folder / "good.svg.py").symlink_to("good.svg")
    (folder / "good.svg").write_text(GOOD)
    ran = subprocess.run([sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True)
    assert ran.stderr.startswith("memrewrite: ")
    assert sentence in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout.split()[1:] == ["2", "False"]


def test_what_is_known_before_torch_is_what_is_known_with_it() -> None:
    assert registry.NAMES == PASSES
    for name in OPTIMIZERS:
        optimizer_factory(name)
    for name in AMP:
        amp_dtype(name)
    for dtype in ("int8", "int16", "int32", "int64", "uint8"):
        largest = torch.iinfo(getattr(torch, dtype)).max
        assert RandomInput.parse(f"2:{dtype}:{min(largest + 1, 10**18 - 1)}").dtype is getattr(torch, dtype)
        if largest < 10**17:
            with pytest.raises(UsageError, match="cannot draw below"):
                InputText.parse(f"2:{dtype}:{largest + 2}")
    assert Source.parse("package.module:attr").file is None


@pytest.mark.parametrize("call", ["optimize", "verify"])
def test_a_seed_no_generator_takes_is_refused(call: str) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    given: tuple[Any, ...] = (model, x) if call == "optimize" else (model, model, x)
    with pytest.raises(UsageError, match=r"Seed 18446744073709551616 is out of range; give a whole number from"):
        getattr(memrewrite, call)(*given, seed=2**64)


def memrewrite_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "memrewrite", *arguments], **{"text": True, **options})


Console = Callable[..., tuple[int, str]]


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Console:
    """The console command in this process: its exit code and what it says on stderr. ``stdout`` is where it prints."""

    def run(*arguments: str, stdout: IO[str]) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["memrewrite", *arguments])
            patch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as ended:
                cli.entry_point()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return run


CHECK = ("optimize", "good.py", "--check", "--budget", "1GB", "--device", "cpu", "-q")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [CHECK, (*CHECK, "--json", "-")], ids=["text", "json"])
def test_standard_output_on_a_full_device(arguments: tuple[str, ...], folder: Path, console: Console) -> None:
    with FULL.open("w") as full:
        code, said = console(*arguments, stdout=full)
    assert code == OutputError.exit_code == 74
    assert re.fullmatch(NO_SPACE, said)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
def test_help_on_a_full_device() -> None:
    """In a process of its own, which Python ends by trying once more."""
    with FULL.open("w") as full:
        ran = memrewrite_command("--help", stdout=full, stderr=subprocess.PIPE)
    assert ran.returncode == OutputError.exit_code
    assert re.fullmatch(NO_SPACE, ran.stderr)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
def test_json_to_a_full_device(folder: Path, console: Console) -> None:
    (folder / "full.json").symlink_to(FULL)
    code, said = console(*CHECK, "--json", "full.json", stdout=io.StringIO())
    assert code == OutputError.exit_code
    assert said == "memrewrite: full.json cannot be written: No space left on device; it is as it was.\n"
    assert FULL.is_char_device()
    assert sorted({*os.listdir(folder)} - {"__pycache__"}) == ["full.json", "good.py"]


def test_a_link_to_a_result_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, file = tmp_path / "report.json", tmp_path / "real" / "r.json"
    link.symlink_to(Path("real") / "r.json")
    for content in (b"first", b"second"):
        fill(link, content)
        assert link.is_symlink()
        assert file.read_bytes() == content
    assert os.listdir(tmp_path / "real") == ["r.json"]


def test_a_write_that_fails_halfway_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    file.write_text("before")

    def half(self: Path, content: bytes) -> int:
        with self.open("wb") as opened:
            opened.write(content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OutputError, match=r"report\.json cannot be written: No space left on device; it is as it was"):
        fill(file, b"after")
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["report.json"]


PRINTING = """
import os, subprocess, sys
os.write(1, b"by number\\n")
print("by name")
sys.__stdout__.write("by another name\\n")
subprocess.run([sys.executable, "-S", "-c", "print('by a process')"])
"""


def test_what_the_model_prints_is_not_in_the_result(folder: Path) -> None:
    (folder / "good.py").write_text(PRINTING + GOOD)
    ran = memrewrite_command(*CHECK, "--json", "-", capture_output=True)
    assert json.loads(ran.stdout)["fits"] is True
    said = ["by another name", "by name", "by number", "by a process"]
    assert sorted(ran.stderr.splitlines()) == sorted(said)


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="there is no /dev/stdout here")
def test_json_to_standard_output_by_its_file(folder: Path) -> None:
    ran = memrewrite_command("cache", "--cache", "plans", "--json", "/dev/stdout", capture_output=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout[: ran.stdout.rindex("}") + 1])["plans"] == []
    assert os.listdir(folder) == ["good.py"]


@pytest.mark.skipif(os.name != "posix", reason="there is no such shell here")
def test_standard_output_that_is_closed() -> None:
    command = [sys.executable, "-m", "memrewrite", "cache", "--cache", "plans"]
    ran = subprocess.run(["/bin/sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True)
    assert ran.returncode == OutputError.exit_code
    assert ran.stderr == "memrewrite: Standard output is closed; give it a file, or /dev/null.\n"


def test_a_reader_that_is_gone_is_no_internal_error(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = memrewrite_command("cache", "--cache", "plans", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert ran.returncode == OutputError.exit_code
    assert "Broken pipe" in ran.stderr
    assert "Exception ignored" not in ran.stderr


@pytest.mark.parametrize("json_too", [False, True], ids=["text", "json"])
def test_names_that_standard_output_cannot_spell(json_too: bool, folder: Path, console: Console) -> None:
    name = "modèle_✓.py"
    (folder / name).write_text(GOOD)
    arguments = ("optimize", name, *CHECK[2:], *(("--json", "-") if json_too else ()))
    written = io.BytesIO()
    assert console(*arguments, stdout=io.TextIOWrapper(written, "ascii")) == (0, "")
    if json_too:
        assert json.loads(written.getvalue())["model"] == f"{name}:Net"
    else:
        assert written.getvalue().decode("ascii").startswith(r"mod\xe8le_\u2713.py:Net: predicted peak")


def test_a_path_in_no_encoding_is_written(folder: Path, console: Console) -> None:
    name = os.fsdecode(b"net_\xff.py")
    (folder / name).write_text(GOOD)
    arguments = ("optimize", name, *CHECK[2:], "--json", "out.json")
    assert console(*arguments, stdout=io.TextIOWrapper(io.BytesIO(), "utf-8")) == (0, "")
    assert json.loads((folder / "out.json").read_text())["model"] == f"{name}:Net"
