"""The benchmark of peak against step time on the CPU: a tiny model, every contender that is not compiled."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks import contenders, models
from tests.benchmarks.language import loss_apart
from tests.benchmarks.pareto import Bench
from tests.benchmarks.rows import ParetoRow


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("unet", tmp_path / "rows.jsonl", torch.device("cpu"), tiny=True, batch=2)


def test_rows_of_a_workload(bench: Bench) -> None:
    bench.run(["eager", "block", "sqrt", "ours min", "ours 80%", "ours 27%"])
    rows = bench.rows()
    assert [name for name, row in rows.items() if row.ok] == ["eager", "block", "ours min", "ours 80%"]
    assert rows["sqrt"].note == "ValueError: the model is no chain of blocks"
    assert (rows["ours 27%"].note, rows["ours 27%"].lowest) == ("infeasible", rows["ours min"].peak)
    eager, ours = rows["eager"], rows["ours 80%"]
    assert eager.fixed is not None
    assert eager.peak is not None
    assert ours.budget == eager.fixed + int(0.8 * (eager.peak - eager.fixed))
    assert ours.peak is not None
    assert ours.peak <= ours.budget < eager.peak
    assert rows["ours min"].note.startswith(("bit-equal", "equivalent"))
    assert all(row.step_ms and row.quartiles_ms and row.versions["torch"] for row in rows.values() if row.ok)


def test_what_the_file_has_is_not_run_again(bench: Bench) -> None:
    bench.run(["eager"])
    before = bench.path.read_text()
    bench.run(["eager"])
    bench.run(["block"], end=0)
    assert bench.path.read_text() == before


def test_a_budget_needs_the_peak_it_refers_to(bench: Bench) -> None:
    bench.run(["ours block"])
    assert bench.rows()["ours block"].note == "ValueError: the peak of block is not known"


class Add(nn.Module):
    def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
        return x + by


@pytest.mark.parametrize(("blocks", "segments"), [(1, 1), (2, 1), (4, 2), (7, 3), (16, 4), (24, 5)])
def test_sqrt_segments_run_every_block_once(blocks: int, segments: int) -> None:
    model = nn.Sequential(*(Add() for _ in range(blocks)))
    assert models.sqrt_segments(model, r"\d+") == segments
    assert model(torch.zeros(1)).item() == blocks


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("ours min", None), ("ours block", 4), ("ours 50%", 6), ("ours+compile 25%", 4), ("ours+compile =0.3", 3)],
)
def test_bounds(name: str, gigabytes: int | None) -> None:
    about: dict[str, Any] = {"workload": "net", "batch": 1, "amp": "off", "optimizer": "sgd", "ok": True}
    peaks = {"eager": 10 * 10**9, "block": 4 * 10**9, "compile 0.3": 3 * 10**9}
    rows = {c: ParetoRow(contender=c, peak=peak, fixed=2 * 10**9, **about) for c, peak in peaks.items()}
    assert contenders.bound(name, rows) == (None if gigabytes is None else gigabytes * 10**9)


@pytest.mark.parametrize(("name", "compiled"), [("ours min", False), ("ours+compile min", True)])
def test_what_will_be_compiled_is_planned_for_it(name: str, compiled: bool) -> None:
    workload = models.WORKLOADS["unet"]
    ready = contenders.prepare(name, workload, workload.build(True), workload.inputs(1, True), {})
    assert cast(Any, ready.module).report.config["compiled"] is compiled


@pytest.mark.zoo
def test_a_loss_outside_is_the_models_own(tmp_path: Path) -> None:
    from tests.zoo.models import declare_operators

    declare_operators()
    workload = models.WORKLOADS["gpt2_medium-bf16"]
    model, inputs = workload.build(True).float().eval(), workload.inputs(2, True)
    given, loss_fn = loss_apart(inputs)
    assert torch.equal(loss_fn(model(**given.kwargs)), model(**inputs.kwargs).loss)
    bench = Bench("gpt2_medium-bf16", tmp_path / "rows.jsonl", torch.device("cpu"), tiny=True, batch=2)
    bench.run(["outside", "outside+block", "ours+outside min"])
    peaks = [row.peak or 0 for row in bench.rows().values()]
    assert peaks[0] > peaks[1] > peaks[2] == bench.rows()["ours+outside min"].predicted


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", models.WORKLOADS)
def test_every_workload_has_its_contenders(name: str, tmp_path: Path) -> None:
    from tests.zoo.models import declare_operators

    declare_operators()
    bench = Bench(name, tmp_path / "rows.jsonl", torch.device("cpu"), tiny=True, batch=4)
    bench.run(["eager", "block", "sqrt", "ours min"])
    assert {row.contender for row in bench.rows().values() if not row.ok} <= {"sqrt" if name == "unet" else ""}
