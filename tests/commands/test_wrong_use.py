"""Every wrong use ends in one sentence on stderr, its exit code, no traceback and nothing half-written."""

import contextlib
import errno
import importlib
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from memrewrite import cli

HEAD = """
import torch
from torch import nn
"""
NET = (
    HEAD
    + """
class WrongNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) * torch.sigmoid(self.fc(x))
"""
)
INPUTS = """
def get_inputs():
    return torch.randn(64, 8)
"""
FULL = NET + INPUTS
BRANCH = FULL.replace("return self.fc(x)", "x = x if x.sum() > 0 else -x\n        return self.fc(x)")
FILES = {
    "good.py": FULL,
    "bare.py": NET,
    "empty.py": "x = 1\n",
    "several.py": FULL + "class Other(WrongNet):\n    pass\n",
    "broken.py": "import torch\nimport no_such_module\n",
    "branch.py": BRANCH,
    "meta.py": FULL + "def get_model():\n    with torch.device('meta'):\n        return WrongNet()\n",
    "lazy.py": FULL.replace("nn.Linear(8, 8)", "nn.LazyLinear(8)"),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of model files as the current one; their modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    for name, code in FILES.items():
        Path(name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def listing() -> list[str]:
    return sorted(name for name in os.listdir() if name != "__pycache__")


WRONG = {
    "no-command": ([], 2, "Missing command"),
    "unknown-command": (["optimise"], 2, "No such command 'optimise'"),
    "no-target": (["optimize"], 2, "Missing argument 'TARGET'"),
    "unknown-option": (["optimize", "good.py", "--bugdet", "8GB"], 2, "No such option"),
    "missing-file": (["optimize", "god.py"], 2, "There is no file god.py; did you mean good.py"),
    "no-model": (
        ["optimize", "empty.py"],
        2,
        "empty.py defines no get_model, build_model, model or nn.Module subclass",
    ),
    "several-models": (["optimize", "several.py"], 2, "several.py:Other"),
    "import-error": (["optimize", "broken.py"], 2, "broken.py, line 2: importing it raised ModuleNotFoundError"),
    "no-inputs": (["optimize", "bare.py"], 2, "bare.py gives no example inputs; add get_inputs()"),
    "input-grammar": (["optimize", "good.py", "--input", "8,8"], 2, "Input '8,8' is not of the form"),
    "input-name": (["optimize", "good.py", "--input", "y=8x8"], 2, "WrongNet.forward has no parameter 'y'"),
    "input-shape": (["optimize", "good.py", "--input", "8x9"], 3, "WrongNet"),
    "batch-size": (["optimize", "good.py", "--batch-size", "0"], 2, "--batch-size"),
    "budget-number": (["optimize", "good.py", "--budget", "8"], 2, "Budget '8' has no known unit"),
    "budget-bits": (["optimize", "good.py", "--budget", "8Gb"], 2, "Budget '8Gb' has no known unit"),
    "budget-infeasible": (["optimize", "good.py", "--budget", "100B"], 6, "lowest"),
    "optimizer": (["optimize", "good.py", "--optimizer", "adamx"], 2, "Optimizer 'adamx' is unknown"),
    "loss": (["optimize", "good.py", "--loss", "no.such:loss"], 2, "The loss 'no.such:loss' cannot be found"),
    "amp": (["optimize", "good.py", "--amp", "fp8"], 2, "--amp"),
    "passes": (["optimize", "good.py", "--passes", "swich"], 2, "There is no pass 'swich'"),
    "device": (["optimize", "good.py", "--device", "gpu"], 2, "Device 'gpu' is not supported"),
    "device-kind": (["optimize", "good.py", "--device", "meta"], 2, "Device 'meta' is not supported"),
    "device-index": (["optimize", "good.py", "--device", "cuda:99"], 2, "There is no device 'cuda:99'"),
    "check-without-budget": (["optimize", "good.py", "--check"], 2, "--check needs a budget"),
    "check-min": (["optimize", "good.py", "--check", "--budget", "min"], 2, "--check needs a budget in bytes"),
    "check-and-output": (
        ["optimize", "good.py", "--check", "--budget", "1GB", "-o", "out"],
        2,
        "--check writes nothing",
    ),
    "verbose-and-quiet": (["optimize", "good.py", "-v", "-q"], 2, "-v or -q"),
    "output-exists": (["optimize", "good.py", "-o", "."], 2, "exists already; give another folder, or force"),
    "json-folder": (["optimize", "good.py", "--json", "no/such/file.json"], 2, "There is no folder for the JSON file"),
    "meta": (["optimize", "meta.py"], 2, "fc.weight lies on the meta device and holds no numbers"),
    "lazy": (["optimize", "lazy.py"], 2, "fc (LazyLinear) has no parameters before it has run once"),
    "uncapturable": (["optimize", "branch.py"], 3, "WrongNet"),
}


@pytest.mark.parametrize(("arguments", "code", "sentence"), WRONG.values(), ids=WRONG)
def test_wrong_use(arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing()
    assert cli.run(arguments) == code
    out, err = capsys.readouterr()
    last = err[err.rindex("memrewrite: ") :]
    assert sentence in last
    assert out == ""
    assert "Traceback" not in err
    assert listing() == before


def test_the_unexpected_is_one_line_and_v_shows_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memrewrite.commands import optimize

    def fail(request: object) -> int:
        raise KeyError("surprise\nsecond line")

    monkeypatch.setattr(optimize, "run", fail)
    assert cli.run(["optimize", "good.py"]) == 70
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "internal error, KeyError" in err
    assert "-v for the traceback" in err
    assert cli.run(["optimize", "good.py", "-v"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_out_of_memory_is_5(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from memrewrite.optimizing import remembered as optimizing

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(optimizing, "run", fail)
    assert cli.run(["optimize", "good.py"]) == 5
    assert "memrewrite: The device ran out of memory: no more" in capsys.readouterr().err


def test_a_forward_that_exits_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exiting.py"
    file.write_text(
        "import sys\nimport torch\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        sys.exit(0)\n\n"
        "model, example_inputs = Net(2, 2), torch.ones(2, 2)\n"
    )
    assert cli.run(["estimate", str(file)]) == 2
    assert "The target's code ended the process (0); let it raise" in capsys.readouterr().err


def test_an_interrupt_in_the_middle_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from memrewrite.optimizing import remembered as optimizing

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizing, "run", interrupt)
    assert cli.run(["optimize", "good.py"]) == 130
    assert capsys.readouterr().err.strip().splitlines() == ["memrewrite: interrupted; nothing half-written is left."]


def test_an_interrupt_while_pytorch_is_imported_is_not_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(name: str) -> ModuleType:
        with contextlib.suppress(KeyboardInterrupt):  # as compiled code does that imports NumPy
            signal.raise_signal(signal.SIGINT)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", losing)
    assert cli.run(["optimize", "good.py"]) == 130
    assert capsys.readouterr().err.strip().splitlines() == ["memrewrite: interrupted; nothing half-written is left."]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_current_folder_that_is_gone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(Path, "cwd", gone)
    assert cli.run(["cache"]) == 2
    assert capsys.readouterr().err == "memrewrite: The current folder is gone; change to one that is there.\n"


SLOW = FULL.replace(
    "def forward(self, x):",
    """def forward(self, x):
        if "memrewrite.commands.measure_child" in " ".join(sys.orig_argv):
            pathlib.Path("child.pid").write_text(str(os.getpid()))
            time.sleep(60)""",
).replace("import torch\n", "import os, pathlib, sys, time\nimport torch\n", 1)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda asked: asked.name)
def test_what_ends_it_while_measuring_leaves_no_child(asked: signal.Signals, tmp_path: Path) -> None:
    if signal.getsignal(asked) is signal.SIG_IGN:
        pytest.skip("What is ignored here, as under nohup, is ignored by what is started from here.")
    Path("slow.py").write_text(SLOW)
    before = listing()
    command = [sys.executable, "-m", "memrewrite", "optimize", "slow.py", "--no-verify", "--device", "cpu", "-o", "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        child = _wait_for_pid(Path("child.pid"), process)
        process.send_signal(asked)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    how = "interrupted" if asked == signal.SIGINT else f"ended by {asked.name}"
    assert err.strip().splitlines()[-1] == f"memrewrite: {how}; nothing half-written is left."
    assert (out, "Traceback" in err) == ("", False)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert [name for name in listing() if name != "child.pid"] == before


def _wait_for_pid(file: Path, process: "subprocess.Popen[str]") -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.1)
    process.kill()
    raise TimeoutError(f"No measuring process began: {process.communicate()[1]}")


@pytest.mark.parametrize("option", [["-o", "out"], ["--json", "out.json"]], ids=["folder", "json"])
def test_a_full_disk_leaves_nothing(
    option: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = listing()
    monkeypatch.setattr(os, "replace", full)
    assert cli.run(["optimize", "good.py", "--no-measure", "--no-verify", *option]) == 74
    out, err = capsys.readouterr()
    assert "No space left on device" in err[err.rindex("memrewrite: ") :]
    assert (out, "Traceback" in err) == ("", False)
    assert listing() == before


def test_a_report_that_cannot_be_written_says_nothing_of_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That was written before."""
    real = os.replace

    def full(source: Path, target: Path) -> None:
        if target.name == "report.html":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    asked = ["optimize", "good.py", "--no-measure", "--no-verify", "-o", "out", "--report", "report.html"]
    assert cli.run(asked) == 74
    said = capsys.readouterr().err
    assert "memrewrite: report.html cannot be written: No space left on device; it is as it was." in said
    assert (Path("out/manifest.json").is_file(), Path("report.html").exists()) == (True, False)
