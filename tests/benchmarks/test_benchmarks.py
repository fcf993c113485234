"""The other benchmarks on the CPU, in tiny form."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memrewrite.workload.stepspec import StepSpec
from tests.benchmarks import (
    contenders,
    guards,
    hardcap,
    large,
    maxbatch,
    plantime,
    predict,
    ready,
    rows,
    titan,
    without_cuda,
)

CPU = torch.device("cpu")
_NODES = 150


@pytest.mark.parametrize(
    "case",
    [
        predict.Case("unet", 4, optimizer="adafactor", frozen=r"inc|down"),
        predict.Case("unet", 4, optimizer="sgd-momentum", budget="80%"),
    ],
    ids=lambda case: case.name,
)
def test_predictions_are_right_on_the_cpu(case: predict.Case) -> None:
    row = predict.run(case, CPU, tiny=True)
    assert row.ok, row.note
    assert row.predicted == row.measured


def test_there_are_thirty_different_cases() -> None:
    assert len({case.name for case in predict.CASES}) == len(predict.CASES) >= 30


UNET: dict[str, Any] = {"workload": "unet", "batch": 4, "amp": "off", "optimizer": "adamw", **rows.machine(CPU)}


def test_what_cuda_took_is_held_against_what_is_predicted_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = rows.ParetoRow(contender=contenders.EAGER, ok=True, peak=1, **UNET)
    rows.append(tmp_path / rows.PARETO, row)
    ((name, _, build, step),) = without_cuda.measured(tmp_path, None, tiny=True)
    assert name == "unet, batch 4"
    (tmp_path / rows.PARETO).unlink()
    rows.append(tmp_path / rows.PARETO, replace(row, peak=2 * without_cuda.predicted(build, step).peak))
    monkeypatch.setattr("sys.argv", ["without_cuda", str(tmp_path), "--tiny"])
    assert without_cuda.main() == 0
    assert "| -50.00% |" in capsys.readouterr().out


def test_under_a_cap_the_plan_is_trained_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "unet", "--tiny", "--device", "cpu", "--steps", "4"]
    monkeypatch.setattr("sys.argv", ["hardcap", str(tmp_path), *options])
    assert hardcap.main() == 0
    (row,) = rows.read(tmp_path / rows.HARDCAP, rows.CapRow)
    assert row.budget is not None
    assert (row.ok, row.steps, row.cap) == (True, 4, int(1.03 * row.budget))
    assert (row.predicted or 0) <= row.budget
    assert "| unet | 0.01 GB | 0.01 GB |" in capsys.readouterr().out
    assert hardcap.main() == 0
    assert rows.read(tmp_path / rows.HARDCAP, rows.CapRow) == [row]


def test_the_cases_of_predict_are_held_against_it_too(tmp_path: Path) -> None:
    for case in ("unet b4 off adamw", "unet b8 off adamw ours 60%"):
        rows.append(tmp_path / rows.PREDICT, rows.PredictRow(ok=True, measured=1, **UNET | {"workload": case}))
    assert [name for name, *_ in without_cuda.measured(tmp_path, ["unet"], tiny=True)] == ["unet b4 off adamw"]


@pytest.mark.parametrize("stack", plantime.STACKS)
def test_stacks_are_about_as_large_as_asked_for(stack: str) -> None:
    module, inputs = plantime.STACKS[stack].made(_NODES)
    row = plantime.run(stack, 1, module, inputs, StepSpec())
    assert row.ok, row.note
    assert row.nodes is not None
    assert math.isclose(row.nodes, _NODES, rel_tol=0.1)
    assert row.plan_s is not None
    assert row.plan_s > 0


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 63, 100, 1000])
@pytest.mark.parametrize("guess", [-5, 0, 1, 8, 90, 5000])
def test_largest_is_within_an_eighth(limit: int, guess: int) -> None:
    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    found = maxbatch.largest(fits, lambda: guess)
    assert found <= limit <= found + max(1, found // 8)
    assert len(tried) == len(set(tried)) <= 16


@pytest.mark.parametrize(
    "contender",
    [
        contenders.EAGER,
        pytest.param(contenders.COMPILED_BLOCK, marks=pytest.mark.zoo),
        pytest.param(contenders.OURS, marks=pytest.mark.zoo),
    ],
)
def test_largest_batch_of_a_workload(contender: str) -> None:
    row = maxbatch.Search("unet", contender, CPU, tiny=True).largest(12 * 10**6)
    assert row.ok, row.note
    assert row.peak is not None
    assert row.peak <= row.budget
    assert row.per_second


def test_largest_batch_without_times() -> None:
    timed = maxbatch.Search("unet", contenders.EAGER, CPU, tiny=True).largest(12 * 10**6)
    row = maxbatch.Search("unet", contenders.EAGER, CPU, tiny=True, timed=False).largest(12 * 10**6)
    assert row.per_second is None
    assert (row.batch, row.peak) == (timed.batch, timed.peak)


@pytest.mark.parametrize(("budget", "batch"), [(10**6, 89), (2 * 10**6, 189), (10**5, 0)])
def test_batches_to_plan_lie_on_a_line(monkeypatch: pytest.MonkeyPatch, budget: int, batch: int) -> None:
    def lowest(search: maxbatch.Search, batch: int) -> None:
        search.known[batch] = 100_000 + 10_000 * batch

    monkeypatch.setattr(maxbatch.Search, "_lowest", lowest)
    row = maxbatch.Search("unet", contenders.OURS, CPU, tiny=True).plan(budget)
    assert (row.batch, row.ok) == (batch, batch > 0)


def test_a_planned_batch_shrinks_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(search: maxbatch.Search, batch: int, budget: int) -> dict[str, int] | None:
        return {"peak": batch} if batch <= 90 else None

    monkeypatch.setattr(maxbatch.Search, "_trained", trained)
    row = maxbatch.Search("unet", contenders.OURS, CPU, planned={1000: 100}).largest(1000)
    assert (row.batch, row.trials, row.ok) == (88, 3, True)


def test_what_guards_cost_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["guards", "--blocks", "2"])
    assert guards.main() == 0
    assert re.search(r"^\d+ modules.*\nguards: [\d.]+ us .*\ncall: [\d.]+ us", capsys.readouterr().out)


def test_seconds_are_told_by_stage(tmp_path: Path) -> None:
    row = ready.run("unet", "min", "cpu", tiny=True)
    assert row.ok, row.note
    stages = ["prepare", "simulate", "capture", "rewrite", "plan", "verify", "report"]
    assert [stage for stage in row.stages if stage != "simulating"] == stages
    assert row.seconds == pytest.approx(sum(row.stages[stage] for stage in stages))
    assert 0 < row.stages["simulating"] <= row.stages["plan"]
    rows.append(tmp_path / "ready.jsonl", row)
    assert rows.read(tmp_path / "ready.jsonl", rows.ReadyRow) == [row]
    head, line = ready.table([row]).splitlines()
    assert len(head) == len(line)
    assert line.split()[0] == "unet"


def test_a_second_start_finds_the_first_ones_plan(tmp_path: Path) -> None:
    first, second = (ready.run("unet", "min", "cpu", tiny=True, cache=str(tmp_path)) for _ in range(2))
    assert (first.ok, second.ok) == (True, True)
    assert "plan" in first.stages
    assert "plan" not in second.stages


@pytest.mark.slow
def test_a_second_start_has_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ready", str(tmp_path / "rows"), "--only", "unet", "--tiny", "--again"])
    assert ready.main() == 0
    (row,) = rows.read(tmp_path / "rows", rows.ReadyRow)
    assert row.ok, row.note
    assert row.again is not None


def test_what_fails_is_a_row_with_its_seconds() -> None:
    row = ready.run("unet", "much", "cpu", tiny=True)
    assert not row.ok
    assert row.note.startswith("UsageError")
    assert row.seconds == row.stages["prepare"]


def test_a_large_model_is_told_in_a_line() -> None:
    pytest.importorskip("transformers")
    line = large.figures("fsdp=8", 4, None, tiny=True)
    assert re.fullmatch(
        r"0\.0B on fsdp=8: .* s \(.* s of the process\), .* GiB of the host, peak .* GB, digest \w{12}", line
    )


def test_a_published_figure_is_told_beside_ours() -> None:
    line = titan.figures(8, 2, tiny=True)
    assert re.match(r"8 GPUs: peak 0\.1 GiB, reserved 0\.1 GiB, published 82\.4 GiB, -99\.9%; at the peak, in ", line)
