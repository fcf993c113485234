"""An artifact is the rewritten model bit for bit, runs without memrewrite, and is written whole or not at all."""

import ast
import copy
import importlib
import inspect
import json
import pickle
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import memrewrite
from memrewrite import cli
from memrewrite.artifact import manifest
from memrewrite.artifact.load import import_artifact, load
from memrewrite.artifact.recheck import verify_in_child
from memrewrite.artifact.save import save
from memrewrite.commands import optimize as commands
from memrewrite.measurement.measuring import Loader
from memrewrite.records.errors import NotEquivalentError, UsageError
from memrewrite.records.outcomes import Check, Measured
from memrewrite.runtime.dropin import programs
from memrewrite.workload.stepspec import StepSpec
from tests.project.test_imports import packages
from tests.support.artifacts import NET, assert_equal, listing, net, optimized, take_step, written

ELSEWHERE = """
import sys
sys.modules["memrewrite"] = None
sys.path[:0] = [".", "out"]
import torch
from artifact_net import ArtifactNet
from artifact_step import take_step
from memrewrite_model import apply

torch.manual_seed(0)
model = ArtifactNet()
applied = apply(model)
assert isinstance(applied, ArtifactNet) and type(applied) is not ArtifactNet
torch.save(take_step(applied), "elsewhere.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model's file, and its artifact in ``out``."""
    yield from written(tmp_path_factory.mktemp("artifact"))


@pytest.fixture
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``folder`` to spoil, as the current folder."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forge(place: Path, **changes: Any) -> None:
    """Change the manifest; a value of None takes an entry out."""
    file = place / "out" / "manifest.json"
    facts = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))


def test_bit_equal_in_a_fresh_process_without_memrewrite(here: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False, cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    assert_equal(torch.load("elsewhere.pt", weights_only=True), take_step(optimized()))


OUTPUT = """
from dataclasses import dataclass

import torch


@dataclass
class Output:
    features: torch.Tensor
    inner: torch.Tensor


torch.export.register_dataclass(Output, serialized_type_name="output_class.Output")
"""
RETURNING = """
import torch
from output_class import Output


class Returning(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)

    def forward(self, x):
        inner = torch.sigmoid(self.first(x).tanh())
        return Output(self.second(inner), inner)
"""


def test_it_is_imported_before_the_classes_that_forward_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "output_class.py").write_text(OUTPUT)
    (tmp_path / "returning.py").write_text(RETURNING)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("returning").Returning()
    save(memrewrite.optimize(model, torch.randn(64, 8), budget="min", verify=False), tmp_path / "out")
    code = (
        "from out.memrewrite_model import apply; import returning; print(type(apply(returning.Returning())).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("Returning\n", "")


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_the_file_is_plain_python(folder: Path) -> None:
    text = (folder / "out" / "memrewrite_model.py").read_text()
    tree = ast.parse(text)
    assert packages(tree.body) <= {"torch", *sys.stdlib_module_names}
    assert packages(ast.walk(tree)) - packages(tree.body) <= {"triton"}
    defined = [name for node in tree.body for name in _defined(node)]
    assert len(defined) == len(set(defined)), "one part of the runtime hides another's name"
    for file in (folder / "out").glob("*.[jp][sy]*"):
        assert str(folder) not in file.read_text()
        assert str(Path.cwd()) not in file.read_text()


def test_manifest(folder: Path) -> None:
    facts = manifest.read(folder / "out")
    assert facts["schema_version"] == manifest.SCHEMA_VERSION
    assert facts["model"] == "artifact_net.ArtifactNet"
    assert facts["peaks"]["predicted_after"] < facts["peaks"]["predicted_before"]
    assert facts["weights"] == {"tied": {"second.weight": "first.weight"}, "channels_last": []}
    assert set(facts["source"]) == {"ArtifactNet", "Block"}
    assert {*facts["files"], "manifest.json"} == set(listing(folder / "out"))


def test_minimum_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={manifest.TORCH_MINIMUM}" in project["dependencies"]


def test_applied_is_a_drop_in(folder: Path) -> None:
    model: Any = net()
    applied: Any = load(folder / "out", model)
    assert isinstance(applied, type(model))
    assert applied.greet() == "hello"
    assert inspect.signature(applied.forward) == inspect.signature(model.forward)
    assert applied.state_dict().keys() == model.state_dict().keys()
    assert all(a is b for a, b in zip(applied.parameters(), model.parameters(), strict=True))
    assert_equal(take_step(applied), take_step(optimized()))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_stay_rewritten(folder: Path, copied: Callable[[nn.Module], nn.Module]) -> None:
    applied = load(folder / "out", net())
    twin = copied(applied)
    assert list(programs(twin)) == [""]
    assert next(twin.parameters()) is not next(applied.parameters())
    assert_equal(take_step(twin), take_step(applied))


def test_a_pickle_finds_the_artifact_once_it_is_loaded(here: Path) -> None:
    Path("model.pickle").write_bytes(pickle.dumps(load("out", net())))
    code = (
        "import pickle, sys; sys.path.insert(0, '.'); from pathlib import Path\n"
        "from memrewrite.artifact.load import import_artifact\n"
        "from memrewrite.runtime.dropin import programs\n"
        "import_artifact(Path('out')); print(len(programs(pickle.loads(Path('model.pickle').read_bytes()))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1", done.stderr


def test_compiled_batch_norm_updates_once(folder: Path, tmp_path: Path) -> None:
    """Without dropout, whose random numbers a compiler may draw in another order."""
    model, plain = net(), net()
    for part in (*model.modules(), *plain.modules()):
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    source = memrewrite.optimize(model, torch.randn(8, 3, 12, 12), budget="min", optimizer="sgd")
    save(source, tmp_path / "compiled")
    applied = load(tmp_path / "compiled", model)
    compiled: Any = torch.compile(applied, backend="aot_eager", fullgraph=True)
    found, expected = take_step(compiled), take_step(plain)
    for name, tensor in plain.named_buffers():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], tensor, msg=name)
    torch.testing.assert_close(found["output"], expected["output"])


def test_weights(folder: Path) -> None:
    from safetensors.torch import load_model

    model = net()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    missing, unexpected = load_model(model, str(folder / "out" / "weights.safetensors"))
    assert not missing
    assert not unexpected
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert_equal({n: t for n, t in model.state_dict().items() if n in trained}, {n: expected[n] for n in trained})


def test_channels_last_weights_are_noted(folder: Path, tmp_path: Path) -> None:
    model: Any = optimized()
    save(model.to(memory_format=torch.channels_last), tmp_path / "out", weights=True)
    assert "stem.weight" in manifest.read(tmp_path / "out")["weights"]["channels_last"]


class Other(nn.Module):
    pass


def retyped() -> nn.Module:
    model: Any = net()
    model.stem.half()
    return model


def untied() -> nn.Module:
    model: Any = net()
    model.second.weight = nn.Parameter(model.first.weight.detach().clone())
    return model


def strided() -> nn.Module:
    model: Any = net()
    model.stem.stride = (2, 2)
    return model


def extended() -> nn.Module:
    model: Any = net()
    model.extra = nn.ReLU()
    return model


def patched() -> nn.Module:
    model: Any = net()
    model.blocks[1].forward = nn.functional.relu
    return model


WRONG_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "class": (Other, "the model is Other, not ArtifactNet"),
    "shape": (lambda: net(width=6), "stem.out_channels is 6, not 4"),
    "dtype": (retyped, r"stem.weight is torch.float16 \(4, 3, 3, 3\), not torch.float32"),
    "attribute": (lambda: net(gain=0.25), "the model.gain is 0.25, not 0.5"),
    "attribute-of-torch": (strided, r"stem.stride is \(2, 2\), not \(1, 1\)"),
    "dropout": (lambda: net(p=0.3), "blocks.0.drop.p is 0.3, not 0.1"),
    "untied": (untied, "second.weight is torch.float32 .*, not tied to first.weight"),
    "extra-module": (extended, "it has extra, which is new"),
    "forward": (patched, "blocks.1.forward is relu, not None"),
    "rewritten": (optimized, "a rewritten one already"),
    "wrapped": (lambda: nn.DataParallel(net()), "the model is DataParallel.*apply it to the model inside"),
}


@pytest.mark.parametrize(("make", "sentence"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_another_model_is_refused(folder: Path, make: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load(folder / "out", make())


def tamper(place: Path) -> None:
    with (place / "out" / "memrewrite_model.py").open("a") as file:
        file.write("\n# one more line\n")


def link(place: Path) -> None:
    file = place / "out" / "report.json"
    file.rename(place / "elsewhere.json")
    file.symlink_to(place / "elsewhere.json")


def break_json(place: Path, text: str = "{") -> None:
    (place / "out" / "manifest.json").write_text(text)


def name_file(name: str) -> Callable[[Path], None]:
    return lambda place: forge(place, files={name: "0" * 64})


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "tampered": (tamper, "memrewrite_model.py is not what was written"),
    "missing-file": (lambda place: (place / "out" / "constants.pt").unlink(), "constants.pt is missing"),
    "missing-manifest": (lambda place: (place / "out" / "manifest.json").unlink(), "is no artifact of memrewrite"),
    "not-json": (break_json, "not a manifest"),
    "no-schema": (lambda place: forge(place, schema_version=None), "not a manifest"),
    "schema": (lambda place: forge(place, schema_version=99), "has schema 99, known is 1"),
    "files-a-number": (lambda place: forge(place, files=3), "not a manifest"),
    "files-a-list": (lambda place: forge(place, files=[[1, "x"]]), "not a manifest"),
    "torch-text": (lambda place: forge(place, torch="2.11"), "not a manifest"),
    "torch-a-number": (lambda place: forge(place, torch={"minimum": 2.11}), "not a manifest"),
    "json-too-deep": (lambda place: break_json(place, "[" * 100_000), "not a manifest"),
    "no-model": (lambda place: forge(place, files={}), "names no memrewrite_model.py"),
    "absolute": (name_file("/etc/passwd"), "'/etc/passwd', which is not a plain file name"),
    "traversal": (name_file("../artifact_net.py"), "'../artifact_net.py', which is not a plain file name"),
    "parent": (name_file(".."), "'..', which is not a plain file name"),
    "windows": (name_file("C:\\x"), "is not a plain file name"),
    "link": (link, "report.json is a link"),
    "torch": (lambda place: forge(place, torch={"minimum": "99.0"}), "needs PyTorch 99.0 or newer"),
}


@pytest.mark.parametrize(("spoil", "sentence"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_folder_that_is_not_as_written_is_refused(here: Path, spoil: Callable[[Path], None], sentence: str) -> None:
    spoil(here)
    with pytest.raises(UsageError, match=sentence):
        load("out", net())


def test_a_file_that_may_not_be_read_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(manifest, "_digest", forbidden)
    with pytest.raises(UsageError, match=r"out/constants\.pt cannot be read: Permission denied; make it readable"):
        load("out", net())


def test_cached_bytecode_is_not_run(here: Path) -> None:
    cache = here / "out" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / f"memrewrite_model.{sys.implementation.cache_tag}.pyc").write_bytes(b"not bytecode")
    assert import_artifact(Path("out")).apply(net())


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("        x = self.bn(", "        # a comment\n        x = self.bn(", ""),
        ("        x = self.bn(", "        x = x + 1\n        x = self.bn(", "the source of class Block is another"),
        ("return x * torch.sigmoid(x)", "return x * x.tanh()", "the source of function gated is another"),
        ("-0.0, 1e-40, 3.0)", "-0.0, 1e-40, 4.0)", "global OFFSETS is (0.1, -0.0, 1e-40, 4.0), not (0.1, -0.0, 1e-40"),
    ],
    ids=["comment", "code", "function", "constant"],
)
def test_the_models_source_is_compared(here: Path, old: str, new: str, sentence: str) -> None:
    (here / "artifact_net.py").write_text(NET.replace(old, new))
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False, cwd=here)
    assert (done.returncode == 0) == (not sentence), done.stderr
    assert sentence in done.stderr


def test_verified_in_a_fresh_process(here: Path) -> None:
    loader = Loader("artifact_net.py:ArtifactNet", artifact="out")
    assert "equivalent" in verify_in_child(loader, StepSpec(optimizer="sgd"), exact=False, timeout_s=120)
    wrong = Path("out/memrewrite_model.py")
    wrong.write_text(wrong.read_text().replace("aten.tanh", "aten.sin"))
    manifest.write(Path("out"), {"torch": {}})
    with pytest.raises(NotEquivalentError, match=r"as saved is not equivalent: .*nothing was written"):
        verify_in_child(loader, StepSpec(optimizer="sgd"), exact=False, timeout_s=120)


def test_command_line_end_to_end(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the process that verifies what was written; those that measure are tried by ``memrewrite measure``."""

    def measured(loader: Loader, *_: object, **__: object) -> Measured:
        peak = 2000 if loader.artifact is None else 1000
        return Measured(peak, peak, 5.0, (), "cpu")

    monkeypatch.setattr(commands, "measure_in_child", measured)
    arguments = ["optimize", "artifact_net.py:ArtifactNet", "--optimizer", "sgd", "--budget", "90%", "--device", "cpu"]
    assert cli.run([*arguments, "-o", "made", "-q"]) == 0, capsys.readouterr().err
    assert "Written: made" in capsys.readouterr().out
    facts = manifest.read(Path("made"))
    assert (facts["peaks"]["measured_after"], facts["peaks"]["measured_before"]) == (1000, 2000)
    assert listing(here) == sorted(["artifact_net.py", "artifact_step.py", "made", "out"])
    before = listing(here)
    assert cli.run([*arguments, "-o", "made", "-q"]) == 2
    assert listing(here) == before


@pytest.mark.parametrize(("same", "asked", "exact"), [(3, False, True), (2, False, False), (2, True, True)])
def test_what_was_saved_is_judged_as_the_result_was(
    same: int, asked: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was found of the result's bits, not by the names of the passes."""
    judged: list[bool] = []
    monkeypatch.setattr(commands, "verify_in_child", lambda loader, step, exact, timeout_s: judged.append(exact))
    job = SimpleNamespace(
        request=SimpleNamespace(exact=asked, step=None, timeout=1.0), loader=lambda artifact: artifact
    )
    report = SimpleNamespace(checks=(Check("output", 3, 3, True), Check("gradient", 3, same, True)))
    commands._verify_saved(cast(Any, job), cast(Any, report), Path("draft"), cast(Any, lambda stage: None))
    assert judged == [exact]
