"""Rows of the benchmarks become tables, targets and curves; what is said elsewhere is what they say."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from memrewrite.targets.cuda_from_cpu import STATED_ERROR
from tests.benchmarks import plots, results, targets
from tests.benchmarks.rows import BatchRow, ParetoRow, PlanRow, PredictRow, read

GB = 10**9
ABOUT: dict[str, Any] = {
    "batch": 8,
    "amp": "off",
    "optimizer": "adamw",
    "device": "a GPU",
    "versions": {"torch": "2.13.0"},
}


def point(contender: str, peak: float, step_ms: float, **figures: Any) -> ParetoRow:
    """A measured row; 2 GB of the peak are fixed."""
    about = {**ABOUT, "workload": "net", "ok": True, "fixed": 2 * GB, **figures}
    return ParetoRow(contender=contender, peak=int(peak * GB), step_ms=step_ms, quartiles_ms=(9.5, 10.5), **about)


def missing(contender: str, note: str, **figures: Any) -> ParetoRow:
    return ParetoRow(contender=contender, workload="net", ok=False, note=note, **ABOUT, **figures)


ROWS = [
    point("eager", 10, 10.0),
    point("block", 5, 13.0),
    missing("sqrt", "out of memory"),
    point("ours 50%", 5.9, 11.0, budget=6 * GB, predicted=59 * GB // 10, segments=3, setup_s=4.2),
    point("ours block", 5, 11.7, budget=5 * GB),
    point("ours 27%", 4.5, 12.0, budget=4 * GB),
    missing("ours 20%", "infeasible", budget=3 * GB, lowest=35 * GB // 10),
    point("ours min", 3.5, 14.0, note="bit-equal"),
    point("compile", 8, 8.0),
    point("compile 0.5", 6, 9.0),
    point("compile 0", 3, 10.0),
    point("ours+compile 50%", 5, 8.1, budget=4 * GB),
]
PREDICTED = [
    PredictRow(workload=f"case {i}", ok=True, predicted=GB + i * GB // 100, measured=GB, seconds=1.0, **ABOUT)
    for i in (0, 1, -5)
] + [PredictRow(workload="case 4", ok=False, note="out of memory", **ABOUT)]


@pytest.mark.parametrize(
    ("name", "value", "by"),
    [
        (
            "measured peak within the budget, eager",
            "2 of 3 feasible rows, at worst 12.50% over (net ours 27%)",
            {"net ours 27%": 1.125},
        ),
        (
            "measured peak within the budget, compiled by torch.compile",
            "0 of 1 feasible rows, at worst 25.00% over (net ours+compile 50%)",
            {"net ours+compile 50%": 1.25},
        ),
        ("lowest activation peak, ours / lowest of any peer", None, {"net": 1.5 / 1}),
        ("step time at the peak of block checkpointing, ours / its", None, {"net": 11.7 / 13}),
        ("step time at 50% of eager's activations, ours / eager", None, {"net": 1.1}),
        ("step time at 27% of eager's activations, ours / eager", None, {"net": 1.4}),
        ("step time at the peak of activation_memory_budget, ours+compile / its", None, {"net compile 0.5": 0.9}),
        ("lowest activation peak compiled, ours / lowest of activation_memory_budget", None, {"net": 3 / 1}),
    ],
)
def test_pareto_targets(name: str, value: str | None, by: dict[str, float]) -> None:
    (target,) = (t for t in targets.pareto_targets(ROWS) if t.name == name)
    assert target.by == pytest.approx(by)
    mean = next(iter(by.values()))
    assert target.value == (value or f"geometric mean x{mean:.3f} over 1, worst x{mean:.3f}")


def test_points_that_are_too_low_for_us_count() -> None:
    (target,) = (t for t in targets.pareto_targets(ROWS) if t.name.startswith("points of activation_memory_budget"))
    assert target.value == "1 of 2"


def test_targets_without_rows() -> None:
    assert [t.value for t in targets.pareto_targets([])] == [
        "0 of 0 feasible rows, none over",
        "0 of 0 feasible rows, none over",
        *5 * ["no rows"],
        "0 of 0",
        "no rows",
    ]
    assert targets.prediction_targets([]) == []


def test_prediction_targets() -> None:
    known = replace(PREDICTED[0], workload="case", predicted_reserved=3 * GB, reserved=4 * GB)
    (_, reserved) = targets.prediction_targets([*PREDICTED, known])
    assert reserved.name == "error of what the allocator is predicted to reserve"
    assert reserved.value == "median 25.00%, worst 25.00% (case), 1 cases"
    assert "| 3.00 GB | 4.00 GB | -25.00% |" in results.predict_table([known])
    (target,) = targets.prediction_targets(PREDICTED)
    assert target.value == "median 1.00%, worst 5.00% (case -5), 3 cases"


def test_curves_are_sorted_by_peak() -> None:
    found = plots.curves(ROWS)
    assert list(found) == ["eager", "block", "ours", "compile", "ours+compile"]
    assert found["compile"] == [(3.0, 10.0, "0"), (6.0, 9.0, "0.5"), (8.0, 8.0, "")]


def test_pareto_table() -> None:
    lines = results.pareto_table(ROWS).splitlines()
    assert lines[0].count("|") == lines[2].count("|")
    assert lines[2] == "| net, batch 8 | eager |  |  | 10.00 GB | 100% | 10.0 ms | 9.5 - 10.5 ms | x1.00 |  |  |  |  |"
    assert lines[5].endswith(
        "| ours 50% | 6.00 GB | 5.90 GB | 5.90 GB | 49% | 11.0 ms | 9.5 - 10.5 ms | x1.10 | 3 | 4.2 s |  |  |"
    )
    assert lines[8].endswith("| infeasible, lowest 3.50 GB |  |")


def test_short_table() -> None:
    assert results.short_table(ROWS).splitlines() == [
        f"Measured on a GPU, torch 2.13.0. GB = 10^9 bytes. {results._HOW}",
        "",
        "| workload | eager | block | ours block | ours 50% | ours 27% | ours min | compile |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| net, batch 8 | 10.00 GB, 10.0 ms | 5.00 GB, x1.30 | 5.00 GB, x1.17 | 5.90 GB, x1.10 | 4.50 GB, x1.20 "
        "| 3.50 GB, x1.40 | 8.00 GB, x0.80 |",
    ]


def test_report_has_a_section_for_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PLOTS", tmp_path / "plots")
    planned = [PlanRow(workload="net", ok=True, nodes=1200, capture_s=2.0, plan_s=3.5, **ABOUT)]
    about = {key: value for key, value in ABOUT.items() if key != "batch"}
    batches = [
        BatchRow(
            workload="net", contender=c, ok=True, budget=8 * GB, batch=b, per_second=100.0 * b, step_ms=1.0, **about
        )
        for c, b in (("eager", 32), ("ours", 96))
    ]
    batches.append(BatchRow(workload="net", contender="eager", ok=True, budget=16 * GB, batch=64, **about))
    for name, rows in (("pareto", ROWS), ("predict", PREDICTED), ("plantime", planned), ("maxbatch", batches)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    full, short, found = results.report(tmp_path, "")
    titles = [line for line in full.splitlines() if line.startswith("## ") and line != "## Plots"]
    assert titles == [
        f"## {t}" for t in ("Targets", "Peak against step time", "Predicted peaks", "Time to plan", "Largest batch")
    ]
    assert "| net | 8.00 GB | 32, 3,200/s | 96, 9,600/s |" in full
    assert "| net | 16.00 GB | 64 |  |" in full
    assert "| net | 1,200 | 2.0 s | 3.5 s |  |" in full
    assert "| case 1 | 1.01 GB | 1.00 GB | +1.00% |  |  |  | 1.0 s |  |" in full
    assert short == results.short_table(ROWS)
    assert len(found) == 10
    assert results.report(tmp_path / "none", "") == ("", "", [])


def test_what_was_not_run_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PLOTS", tmp_path / "plots")
    for name, rows in (("all/pareto", ROWS), ("all/predict", PREDICTED), ("some/predict", PREDICTED[:1])):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    full, _, _ = results.report(tmp_path / "all", "")
    page = f"a\n<!-- results:begin -->\n{full}\n<!-- results:end -->\nb"
    assert results.report(tmp_path / "none", page)[0] == full
    again, _, _ = results.report(tmp_path / "some", page)
    assert results.pareto_table(ROWS) in again
    assert again.count("measured peak within the budget, eager") == again.count("error of the predicted peak") == 1
    assert ", 1 cases" in again


def test_a_row_of_older_code_says_so() -> None:
    old, new = "2026-11-21 12:26 2ae24eb", "2026-11-22 19:48 8e8c369"
    rows = [replace(PREDICTED[0], code=old), replace(PREDICTED[1], code=new), replace(PREDICTED[2])]
    codes = [line.split(" | ")[-1].removesuffix(" |") for line in results.predict_table(rows).splitlines()[2:]]
    assert codes == [f"older: {old}", new, "older: not noted"]
    batches = [
        BatchRow(workload="net", contender=c, budget=GB, ok=True, **ABOUT, code=at)
        for c, at in (("eager", old), ("block", new))
    ]
    assert f"older: {old}" in results.batch_table(batches)


def test_every_measured_row_says_by_which_code() -> None:
    measured = Path(results.__file__).with_name("measured")
    rows = [json.loads(line) for file in sorted(measured.glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert len(rows) > 300
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d .+", row["code"]) for row in rows)


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in ROWS))
    assert read(path, ParetoRow) == ROWS
    assert read(tmp_path / "none.jsonl", ParetoRow) == []


def test_fill_replaces_the_block_alone() -> None:
    text = "a\n<!-- results:begin -->\nold\n<!-- results:end -->\nb\n"
    assert results.fill(text, "new") == "a\n<!-- results:begin -->\nnew\n<!-- results:end -->\nb\n"
    with pytest.raises(ValueError, match="0 blocks"):
        results.fill("a\n", "new")


def test_both_files_have_a_block() -> None:
    for path in (results.README, results.RESULTS):
        assert "new" in results.fill(path.read_text(), "new")


def test_the_error_stated_without_cuda_is_the_measured_one() -> None:
    section = results.RESULTS.read_text().partition("## Predicted for CUDA without CUDA\n")[2].partition("\n## ")[0]
    found = re.findall(r"worst ([\d.]+)%, (\d+) steps", section)
    worst, steps = max(float(error) for error, _ in found), sum(int(count) for _, count in found)
    assert STATED_ERROR.startswith(f"{steps} steps ")
    assert f" at most {worst:.1f} % " in STATED_ERROR
    assert f"at most {worst:.1f} %, in {steps} steps" in " ".join(results.README.read_text().split())
