"""The benchmark of loops on the CPU, in tiny form."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks import loops
from tests.support.loops import LOOPS


@pytest.mark.parametrize(("name", "loop"), [("unet", "tutorial"), ("language model", "prefetch")])
def test_the_real_peak_is_the_predicted_one(name: str, loop: str) -> None:
    row = loops.run(name, loop, torch.device("cpu"), tiny=True)
    assert row.ok
    assert row.measured == row.predicted
    assert row.original is not None
    assert row.budget is not None
    assert row.predicted is not None
    assert row.predicted <= row.budget < row.original
    assert row.habits is not None
    assert row.habits["keeping the output"] > 0


def test_what_there_was_no_time_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loops, "CASES", {"cnn": lambda tiny: (_ for _ in ()).throw(RuntimeError("broken"))})
    arguments = ["loops", str(tmp_path), "--device", "cpu", "--tiny"]
    monkeypatch.setattr(sys, "argv", arguments)
    loops.main()
    rows = [json.loads(line) for line in (tmp_path / loops.LOOPS).read_text().splitlines()]
    assert len(rows) == len(LOOPS)
    assert {(row["ok"], row["note"]) for row in rows} == {(False, "RuntimeError: broken")}
    monkeypatch.setattr(sys, "argv", [*arguments, "--seconds", "-1"])
    loops.main()
    assert "No time was left for: cnn, tutorial; " in capsys.readouterr().out
