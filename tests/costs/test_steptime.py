"""The predicted time of a step, and where the report tells it."""

import contextlib
import io
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import memrewrite
from memrewrite.costs import ROOFLINES, Costs, Times
from memrewrite.costs.profile import Profile
from memrewrite.costs.steptime import step_times
from memrewrite.costs.table import Table
from memrewrite.costs.timer import Measure
from memrewrite.costs.work import of_loss, of_optimizer
from memrewrite.observe.effects import Effects
from memrewrite.optimizing import run as optimizing
from memrewrite.plan.marks import Marks, NodeMark
from memrewrite.plan_facts.chain import compute_nodes
from memrewrite.records.outcomes import Measured, Peaks
from memrewrite.records.report import Report
from memrewrite.report.printed import WIDTH
from memrewrite.report.tables import show
from memrewrite.workload.step import Inputs, Step
from tests.support.timing import Net, Recorded, node_named, observed, opened

CUDA = ROOFLINES["cuda"]


@pytest.fixture(scope="module")
def effects() -> Effects:
    torch.manual_seed(0)
    return observed(Net(), torch.randn(4, 8))


def test_a_segment_runs_up_to_its_last_save(effects: Effects) -> None:
    costs = Profile(Table("here", None), opened(Recorded())).costs(effects, None)
    linear, silu, relu = (node_named(effects, name) for name in ("linear", "silu", "relu"))
    assert costs.segment([linear], effects) == 0.0
    assert costs.segment([linear, silu], effects) == 2.0
    assert costs.segment([linear, silu, relu], effects) == 6.0
    assert costs.segment([silu, relu, linear], effects) == 4.0


def test_the_time_of_a_step_is_that_of_the_device_or_of_the_cpu(effects: Effects) -> None:
    nodes = compute_nodes(effects)
    work = [node for node in nodes if effects.of[node].moved]
    slow_device = Costs(CUDA, None, {node: Times(2.0, 5.0, 0.1, 0.2) for node in work})
    slow_cpu = Costs(CUDA, None, {node: Times(0.0, 0.0, 0.1, 0.2) for node in work})
    assert max(step_times(effects, slow_device, ())) == pytest.approx(7.0 * len(work), rel=1e-6)
    assert max(step_times(effects, slow_cpu, ())) == pytest.approx(0.3 * len(work), rel=1e-6)
    assert max(step_times(effects, slow_device, (), passes=3)) == pytest.approx(21.0 * len(work), rel=1e-6)
    segment = [node_named(effects, name) for name in ("linear", "silu", "relu")]
    marks = Marks(tuple((node.name, NodeMark((0,))) for node in segment))
    assert max(step_times(effects, slow_device, (), marks=marks)) == pytest.approx(7.0 * len(work) + 6.0, rel=1e-6)
    expected = 0.3 * len(work) + 0.3 + CUDA.segment_ms
    assert max(step_times(effects, slow_cpu, (), marks=marks)) == pytest.approx(expected, rel=1e-6)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return torch.sin(y) + y


def test_gradients_that_meet_are_added() -> None:
    found = observed(Fork(), torch.randn(4, 8))
    costs = Costs(CUDA, None, {node: Times(0.0) for node in compute_nodes(found)})
    assert max(step_times(found, costs, ())) == pytest.approx(3 * 4 * 8 * 4 / CUDA.bytes_per_ms)


@pytest.mark.parametrize(
    ("optimizer", "passes"),
    [(None, 0), (torch.optim.SGD, 3), (lambda p: torch.optim.SGD(p, momentum=0.9), 8)],
    ids=["none", "sgd", "sgd-momentum"],
)
def test_the_bytes_an_optimizer_moves(optimizer: Any, passes: int) -> None:
    model = nn.Linear(64, 64, bias=False)
    work = of_optimizer(model, Inputs((torch.randn(2, 64),), {}), Step(optimizer=optimizer))
    assert work.moved == passes * 64 * 64 * 4
    assert model.weight.grad is None
    assert type(model.weight) is nn.Parameter


def test_the_bytes_a_loss_moves() -> None:
    model, x = nn.Linear(8, 64, bias=False), torch.randn(16, 8)
    found = observed(model, x)
    size = 16 * 64 * 4

    def work(loss_fn: Any, mode: Any = "train") -> int:
        return of_loss(found, lambda flat: flat[0], Step(mode, loss_fn=loss_fn), "cpu").moved

    assert work(lambda y: y.sum()) == pytest.approx(size, rel=0.01)
    assert work(lambda y: y.exp().sum()) == pytest.approx(6 * size, rel=0.01)
    assert work(lambda y: y.sum(), "inference") == 0
    assert work(lambda y: y.sum() * y.sum().item()) == 0


@contextlib.contextmanager
def profiled(monkeypatch: pytest.MonkeyPatch, measure: Measure) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(optimizing, "profile_on", lambda device: Profile(Table("here", None), opened(measure)))
        yield


def test_the_report_tells_the_predicted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 8)
    with profiled(monkeypatch, Recorded()):
        report = memrewrite.optimize(Net(), x, budget="min").report
    assert report.segments
    assert report.predicted_ms_before is not None
    assert report.predicted_ms_after is not None
    rerun = sum(segment.rerun_ms for segment in report.segments)
    assert report.predicted_ms_after - report.predicted_ms_before == pytest.approx(rerun, rel=1e-3)
    data = report.to_json()
    assert data["schema_version"] == 1
    assert data["predicted_ms_after"] == report.predicted_ms_after
    with profiled(monkeypatch, Recorded()):
        unchanged = memrewrite.optimize(Net(), x).report
    assert unchanged.predicted_ms_after == unchanged.predicted_ms_before


def test_the_table_shows_the_predicted_time() -> None:
    peaks = Peaks(10, 10, (), {}, 10)
    report = Report("Net", "train", "cuda:0", {}, None, peaks, peaks, predicted_ms_before=20.0, predicted_ms_after=25.0)
    assert "predicted step time 20.0 ms 25.0 ms x1.25" in printed(report)
    assert "measured step time" not in printed(report)
    took = Measured(10, 10, 30.0, (), "H200")
    text = printed(replace(report, predicted_ms_after=None, measured_before=took))
    assert "predicted step time 20.0 ms not predicted measured step time 30.0 ms not measured" in text
    assert "predicted step time" not in printed(replace(report, predicted_ms_before=None, predicted_ms_after=None))


def printed(report: Report) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream, width=WIDTH))
    return " ".join(stream.getvalue().split())


def test_on_the_cpu_no_time_is_predicted() -> None:
    report = memrewrite.optimize(Net(), torch.randn(64, 8), budget="min").report
    assert (report.predicted_ms_before, report.predicted_ms_after) == (None, None)


class Unseen(nn.Module):
    """Can be captured in regions only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * random.random()  # noqa: S311


def test_of_a_model_in_regions_no_time_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    with profiled(monkeypatch, Recorded()):
        report = memrewrite.optimize(Unseen(), torch.randn(64, 8), verify=False).report
    assert report.config["regions"] == ["body"]
    assert (report.predicted_ms_before, report.predicted_ms_after) == (None, None)
