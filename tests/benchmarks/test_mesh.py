"""The benchmark of meshes in two processes on the CPU, in tiny form."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import mesh, mesh_compiled
from tests.benchmarks.mesh_plans import CASES, Case


def test_a_name_says_its_mesh() -> None:
    meshes = {name: str(Case(name, 2).mesh) for name in CASES}
    assert {name.partition("-")[2]: found for name, found in meshes.items()} == {
        "ddp": "ddp=2",
        "tp": "tp=2",
        "fsdp": "fsdp=2",
        "fsdp-offload": "fsdp=2,cpu-offload",
    }


def test_two_processes_take_what_one_predicts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--only", "unet-fsdp", "--contenders", "block", "ours block", "--tiny"]
    monkeypatch.setattr("sys.argv", ["mesh", str(tmp_path / "mesh.json"), "--plans", str(tmp_path / "plans"), *asked])
    assert mesh.main() == 0
    block, ours = json.loads((tmp_path / "mesh.json").read_text(encoding="utf-8"))["rows"]
    assert (block["note"], ours["note"]) == ("", "")
    assert block["predicted"] == block["measured"]
    assert block["tracked"] == pytest.approx(block["measured"], rel=0.1)  # as PyTorch's own test has it
    assert ours["predicted"] == ours["measured"] <= ours["budget"] == int(1.005 * block["predicted"])
    assert len([*(tmp_path / "plans").iterdir()]) == 3
    assert "all is planned after" in capsys.readouterr().out


def test_two_processes_train_what_is_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr("sys.argv", ["mesh_compiled", f"{file}", "--only", "unet-fsdp", "--who", "eager", "--tiny"])
    assert mesh_compiled.main() == 0
    row = json.loads(file.read_text(encoding="utf-8"))
    assert (row["who"], row["processes"], row["budget"]) == ("eager", 2, None)
    assert row["losses"][-1] < row["losses"][0]
    assert row["step_ms"] > 0
