"""``memrewrite measure``: real processes once each way, and what it makes of failures and many batch sizes."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from memrewrite import cli
from memrewrite.artifact import manifest
from memrewrite.commands import measure as command
from memrewrite.commands import measure_child
from memrewrite.measurement.measuring import Loader
from memrewrite.records.errors import CaptureError, DoesNotFitError, MeasurementError, OtherInputsError, UsageError
from memrewrite.records.outcomes import Measured
from memrewrite.report import batch_plot
from memrewrite.report.measured import Failure, Pair
from memrewrite.simulate import simulate
from memrewrite.workload.step import PHASES, Inputs, Step
from memrewrite.workload.stepspec import StepSpec
from tests.support.artifacts import written
from tests.support.schema import assert_answer

NET = "artifact_net.py:ArtifactNet"
OPTIONS = ["--optimizer", "none", "--device", "cpu", "-q"]  # in less time: it is no optimizer's that is looked at


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from written(tmp_path_factory.mktemp("measured"))


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.run(["measure", NET, *OPTIONS, *arguments, "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert_answer("measure", answer)
    return answer


def test_both_variants_phase_by_phase(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["measure", NET, *OPTIONS, "--artifact", "out", "--json", "both.json"]) == 0
    out = capsys.readouterr().out
    answer = json.loads(Path("both.json").read_text())
    assert_answer("measure", answer)
    (run,) = answer["runs"]
    old, new = run["original"], run["rewritten"]
    assert new["peak"] < old["peak"]
    assert [name for name, _ in old["phases"]] == [*PHASES, *PHASES]
    model = sys.modules["artifact_net"].ArtifactNet()
    simulated = simulate(model, Inputs((torch.randn(8, 3, 12, 12),), {}), Step(optimizer=None))
    assert (old["peak"], [size for _, size in old["phases"]]) == (
        simulated.peak,
        [size for _, size in simulated.phases],
    )
    assert f"{NET}: train step on cpu" in out
    assert re.search(r"phase +original step 1 +original step 2 +rewritten step 1 +rewritten step 2", out)
    assert re.search(r"peak allocated +\S+ B +\S+ B +-\d", out)
    assert "device in use" not in out


@pytest.mark.parametrize("kind", ["measure", "verify"])
def test_a_mode_the_artifact_is_not_for(here: Path, kind: str) -> None:
    """Its rewritten forward would not run, in silence."""
    with pytest.raises(UsageError, match="was made for steps in train mode; say --mode train"):
        in_this_process(kind, StepSpec("inference"))


@pytest.mark.parametrize("kind", ["measure", "verify"])
def test_inputs_the_artifact_is_not_for(here: Path, kind: str) -> None:
    sentence = (
        "was not made for these inputs. Optimized ArtifactNet ran its original forward: an input is torch.float32"
    )
    with pytest.raises(OtherInputsError, match=sentence):
        in_this_process(kind, StepSpec(), inputs=("8x3x14x12",))


@pytest.mark.parametrize("kind", ["measure", "verify"])
def test_inputs_that_a_strict_artifact_refuses(here: Path, kind: str, tmp_path: Path) -> None:
    strict = tmp_path / "strict"
    shutil.copytree(here / "out", strict)
    code = (strict / manifest.MODEL).read_text()
    (strict / manifest.MODEL).write_text(code.replace("\nPROGRAM.source", "\nPROGRAM.strict = True\nPROGRAM.source"))
    manifest.write(strict, {"torch": {}})
    with pytest.raises(OtherInputsError, match="takes inputs of size 16, planned for 8"):
        in_this_process(kind, StepSpec(), artifact=str(strict), inputs=("16x3x12x12",))


def test_inputs_that_the_model_does_not_take(here: Path) -> None:
    for kind, artifact in [("measure", None), ("verify", "out")]:
        with pytest.raises(CaptureError, match=r"ArtifactNet fails on the example inputs with RuntimeError: .*give"):
            in_this_process(kind, StepSpec(), artifact=artifact, inputs=("8x4x12x12",))


NOT_READY = {
    "meta": ("torch.device('meta')", "stem.weight lies on the meta device and holds no numbers"),
    "lazy": ("patch.object(nn, 'Linear', lambda *_: nn.LazyLinear(4))", r"first \(LazyLinear\) has no parameters"),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_a_model_that_has_no_numbers_yet(name: str, here: Path) -> None:
    how, sentence = NOT_READY[name]
    text = f"from unittest.mock import patch\nfrom artifact_net import *\nwith {how}:\n    model = ArtifactNet()\n"
    (here / f"{name}_net.py").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        in_this_process("measure", StepSpec(), target=f"{name}_net.py:model", artifact=None)


LATER = """
def loss(out):
    return out.sum()

def same(x):
    return x
"""


def test_what_the_target_imports_later_is_beside_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward, and for the loss; the current folder is another one."""
    for name in ("later_net", "later_code"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    text = (here / "artifact_net.py").read_text()
    text = text.replace("        x = self.blocks(", "        from later_code import same\n        x = self.blocks(")
    (here / "later").mkdir()
    (here / "later" / "later_net.py").write_text(text)
    (here / "later" / "later_code.py").write_text(LATER)
    path, target = list(sys.path), "later/later_net.py:ArtifactNet"
    in_this_process("measure", StepSpec(loss="later_code:loss"), artifact=None, target=target)
    assert sys.path == path
    with pytest.raises(UsageError, match="the source of class ArtifactNet is another"):
        in_this_process("verify", StepSpec(loss="later_code:loss"), target=target)  # not that there is no such loss


def in_this_process(kind: str, step: StepSpec, target: str = NET, artifact: str | None = "out", **fields: Any) -> None:
    """What the measuring process does; its errors come back by name, as tests/measurement/test_measure.py sees to."""
    loader = Loader(target, artifact=artifact, **fields)
    job = {"kind": kind, "loader": asdict(loader), "step": step.to_json(), "steps": 1, "exact": False, "device": "cpu"}
    measure_child.JOBS[kind](job)


def fake(monkeypatch: pytest.MonkeyPatch, largest: int = 10**9) -> list[Loader]:
    """Measure without a process: 1000 bytes a sample, 600 rewritten, as far as the device holds them."""
    seen = []

    def measure_in_child(loader: Loader, *args: object, **kwargs: object) -> Measured:
        seen.append(loader)
        size = (loader.batch_size or 8) * (600 if loader.artifact else 1000) * 1000
        if size > largest:
            raise DoesNotFitError(f"No room for {size} bytes.")
        if loader.artifact and loader.batch_size == 1:
            raise OtherInputsError("Not for batch 1.")
        return Measured(size, size, size / 10**6, tuple((phase, size) for phase in [*PHASES, *PHASES]), "cpu")

    monkeypatch.setattr(command, "measure_in_child", measure_in_child)
    return seen


def test_peaks_of_several_batch_sizes(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake(monkeypatch, 100 * 10**6)
    sizes = ["--batch-sizes", "1,64,128,256", "--artifact", "out"]
    assert cli.run(["measure", NET, *OPTIONS, *sizes]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "1 1.0 MB (1.0 MiB) other inputs" in rows
    assert "64 64.0 MB (61.0 MiB) 38.4 MB (36.6 MiB) -40.0 % 38.4 ms x0.60" in rows
    assert "128 does not fit 76.8 MB (73.2 MiB) 76.8 ms" in rows
    assert "256 does not fit does not fit" in rows
    assert "Note: No room for 128000000 bytes." in rows
    assert [(loader.batch_size, loader.artifact) for loader in seen[:4]] == [
        (1, None),
        (1, "out"),
        (64, None),
        (64, "out"),
    ]
    runs = result(capsys, *sizes)["runs"]
    assert [run["batch_size"] for run in runs] == [1, 64, 128, 256]
    assert runs[2]["original"] == {"failed": "No room for 128000000 bytes."}
    assert runs[2]["rewritten"]["peak"] == 76_800_000


def test_a_batch_size_that_the_model_does_not_take(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_in_child(loader: Loader, *_: object, **__: object) -> Measured:
        if loader.batch_size == 1:
            raise CaptureError("Expected more than 1 value per channel.")
        return Measured(1000, 1000, 1.0, (), "cpu")

    monkeypatch.setattr(command, "measure_in_child", measure_in_child)
    assert cli.run(["measure", NET, *OPTIONS, "--batch-sizes", "1,2"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "1 failed" in rows
    assert "2 1000 B 1.0 ms" in rows
    assert cli.run(["measure", NET, *OPTIONS, "--batch-size", "1"]) == 3


def test_one_batch_size_reaches_the_process(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake(monkeypatch)
    (run,) = result(capsys, "--batch-size", "5")["runs"]
    assert (run["batch_size"], run["original"]["peak"], "rewritten" in run) == (5, 5_000_000, False)
    assert seen[0] == Loader(NET, batch_size=5)


def test_compiled_steps_are_measured_on_cuda_only(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake(monkeypatch)
    assert cli.run(["measure", NET, *OPTIONS, "--compiled"]) == 2
    assert "is measured on CUDA, not on cpu; leave out --compiled" in capsys.readouterr().err
    monkeypatch.setattr(command, "device_named", torch.device)
    assert cli.run(["measure", NET, "--device", "cuda:0", "--compiled", "-q"]) == 0
    assert seen == [Loader(NET, device="cuda:0", compiled=True)]


@pytest.mark.parametrize("arguments", [[], ["--artifact", "out"], ["--batch-sizes", "2,4"]])
def test_nothing_fits(
    here: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, 0)
    assert cli.run(["measure", NET, *OPTIONS, *arguments]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert "memrewrite: No room for" in err


def test_what_else_fails_ends_the_run_of_one_size(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: object, **kwargs: object) -> Measured:
        raise MeasurementError("The measuring process died.")

    monkeypatch.setattr(command, "measure_in_child", die)
    assert cli.run(["measure", NET, *OPTIONS, "--artifact", "out"]) == 5


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_plot(
    here: Path, suffix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    fake(monkeypatch, 100 * 10**6)
    file = tmp_path / f"peaks{suffix}"
    assert result(capsys, "--batch-sizes", "8,128", "--artifact", "out", "--plot", str(file))["plot"] == str(file)
    head = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert file.read_bytes().startswith(head)
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    save = figure_module.Figure.savefig

    def keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_module.Figure, "savefig", keep)

    def peak(size: int) -> Measured:
        return Measured(size, size, 1.0, (), "cpu")

    lost = Failure(DoesNotFitError("no"))
    pairs = [Pair(8, peak(2 * 10**9), peak(10**9)), Pair(16, lost, peak(3 * 10**9))]
    batch_plot.draw(pairs, tmp_path / "a.svg", "$a.py$:Net\x07")
    (axes,) = figures[0].axes
    drawn = {line.get_label(): [list(values) for values in line.get_data()] for line in axes.lines}
    assert drawn == {"original": [[8], [2.0]], "rewritten": [[8, 16], [1.0, 3.0]]}
    assert (axes.get_xlabel(), axes.get_ylim()[0]) == ("batch size", 0)
    assert "GB" in axes.get_ylabel()
    text = (tmp_path / "a.svg").read_text()
    assert r"$a.py$:Net\x07" in text  # as it is, not as a formula


def test_without_matplotlib(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.run(["measure", NET, *OPTIONS, "--batch-sizes", "1,2", "--plot", "a.png"]) == 2
    assert "pip install 'memrewrite[plots]'" in capsys.readouterr().err
    assert seen == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batch-sizes", "8,x"], "'8,x' is not a list of different batch sizes such as 32,64,128."),
        (["--batch-sizes", "8,8"], "is not a list of different batch sizes"),
        (["--batch-sizes", "0,8"], "is not a list of different batch sizes"),
        (["--batch-size", "8", "--batch-sizes", "8,9"], "Give --batch-size or --batch-sizes, not both."),
        (["--plot", "a.png"], "--plot draws the peak against the batch size; give --batch-sizes 32,64,128."),
        (
            ["--batch-sizes", "8,9", "--plot", "a.txt"],
            "a.txt cannot be drawn; give a file that ends in .png, .svg, .pdf.",
        ),
        (["--batch-sizes", "8,9", "--plot", "no/a.png"], "no folder for the --plot file no/a.png; make it first."),
        (["--artifact", "no"], "no is no artifact of memrewrite: it holds no manifest.json."),
        (["--device", "cuda:99"], "There is no device 'cuda:99'"),
    ],
)
def test_wrong_use(
    here: Path,
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = fake(monkeypatch)
    assert cli.run(["measure", NET, "-q", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, seen) == ("", [])
    assert sentence in err
