"""Rows of the benchmark become the tables of RESULTS.md and README.md."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import results


def rows() -> list[results.Row]:
    about: dict[str, Any] = {"workload": "net", "batch_size": 8, "amp": "off", "device": "a GPU", "torch": "2.13.0"}
    fits: dict[str, Any] = {"predicted": 48 * 10**8, "measured": 5 * 10**9, "step_ms": 12.0, "segments": 3}
    fits["optimize_s"] = 4.2
    infeasible: dict[str, Any] = {"bound": 33 * 10**8, "lowest": 4 * 10**9, "verdict": "infeasible, lowest 4.00 GB"}
    return [
        results.Row(**about, budget="eager", passed=True, verdict="eager", measured=10**10, step_ms=10.0),
        results.Row(**about, budget="60%", passed=True, verdict="equivalent", bound=6 * 10**9, **fits),
        results.Row(**about, budget="33%", passed=True, **infeasible),
        results.Row(**about, budget="min", passed=False, verdict="not equivalent", **fits),
    ]


def test_full_table() -> None:
    assert results.full_table(rows()).splitlines() == [
        "Measured on a GPU, torch 2.13.0. GB = 10^9 bytes.",
        "",
        "| workload | budget | bound | predicted | measured | of eager | step | time | segments | optimize | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| net, batch 8 | eager |  |  | 10.00 GB | 100% | 10.0 ms | x1.00 |  |  | eager |",
        "| net, batch 8 | 60% | 6.00 GB | 4.80 GB | 5.00 GB | 50% | 12.0 ms | x1.20 | 3 | 4 s | equivalent |",
        "| net, batch 8 | 33% | 3.30 GB |  |  |  |  |  |  |  | infeasible, lowest 4.00 GB |",
        "| net, batch 8 | min |  | 4.80 GB | 5.00 GB | 50% | 12.0 ms | x1.20 | 3 | 4 s | not equivalent |",
    ]


def test_short_table() -> None:
    assert results.short_table(rows()).splitlines()[2:] == [
        "| workload | eager | 60% | 33% | min |",
        "| --- | --- | --- | --- | --- |",
        "| net, batch 8 | 10.00 GB, 10.0 ms | 5.00 GB, x1.20 | infeasible, lowest 4.00 GB | failed |",
    ]


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows()))
    assert results.read(path) == rows()
    assert results.read(tmp_path / "none.jsonl") == []


def test_fill_replaces_the_block_alone() -> None:
    text = "a\n<!-- results:begin -->\nold\n<!-- results:end -->\nb\n"
    assert results.fill(text, "new") == "a\n<!-- results:begin -->\nnew\n<!-- results:end -->\nb\n"
    with pytest.raises(ValueError, match="0 blocks"):
        results.fill("a\n", "new")


def test_both_files_have_a_block() -> None:
    for path in (results.README, results.RESULTS):
        assert "new" in results.fill(path.read_text(), "new")
