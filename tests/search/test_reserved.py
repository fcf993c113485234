"""A budget of reserved bytes bounds what CUDA's caching allocator holds, also where that is predicted without CUDA."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import memrewrite
from memrewrite.cli import main
from memrewrite.measurement import measuring
from memrewrite.optimizing import run
from memrewrite.records.errors import BudgetInfeasibleError, UsageError
from memrewrite.records.options import Budget, format_bytes
from memrewrite.records.outcomes import Measured
from memrewrite.report.tables import over_budget
from memrewrite.runtime.dropin import programs
from memrewrite.search import bench
from memrewrite.simulate import Timeline, requests, simulate
from memrewrite.targets.allocator import Allocator, Requests
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.workload.step import Inputs, Step

ROWS, WIDTH, LAYERS = 8192, 512, 8


class Net(nn.Module):
    """A chain of activations of 16 MiB and 48 MiB each, which share segments badly.

    Gradients come to the sums as views, to which autograd adds nothing in place.
    """

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = (x + down(nn.functional.gelu(up(x)))).t().t()
        return x


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return torch.zeros(ROWS, WIDTH)


def planned(inputs: Tensor, layers: int = LAYERS, **options: Any) -> "memrewrite.OptimizedModule":
    torch.manual_seed(0)
    return memrewrite.optimize(Net(layers), inputs, device="cuda", verify=False, **options)


def optimized(inputs: Tensor, **options: Any) -> memrewrite.Report:
    return planned(inputs, **options).report


STEP = Step("train", torch.optim.AdamW, target=CUDA_FROM_CPU)
LIBRARIES = STEP.target.workspace_bytes(torch.device("cpu"), None, "train")


def simulated(module: nn.Module, inputs: Tensor) -> Timeline:
    return simulate(module, Inputs((inputs,), {}), STEP, workspace_bytes=LIBRARIES)


def asked_by(module: nn.Module, inputs: Tensor) -> Requests:
    return requests(module, Inputs((inputs,), {}), STEP, workspace_bytes=LIBRARIES)


def reserved_under(cap: int | None, module: nn.Module, inputs: Tensor) -> int:
    if cap is None:
        return simulated(module, inputs).reserved
    return asked_by(module, inputs).reserved_under(cap)


def test_what_is_reserved_is_within_the_budget(inputs: Tensor) -> None:
    plain = optimized(inputs, budget="60%")
    report = optimized(inputs, budget="60%", reserved=True)
    assert report.budget == int(0.6 * report.predicted_before.reserved)
    assert report.reserved
    assert report.segments
    assert report.held == report.predicted_after.reserved <= report.budget
    assert (plain.reserved, plain.held) == (False, plain.predicted_after.peak)
    assert report.predicted_after.peak <= report.predicted_after.reserved
    assert report.to_json()["reserved"] is True
    assert f"reserves {format_bytes(report.held).partition(' (')[0]}, within the budget" in report.to_html()
    assert report.config["budget"] == "60% of the original reserved"
    assert not over_budget(report)


def test_a_plan_trains_in_a_process_that_may_reserve_little_more(inputs: Tensor) -> None:
    result = planned(inputs, budget="70%")
    budget, after = result.report.budget or 0, result.report.predicted_after
    cap = int(1.02 * budget)
    assert reserved_under(cap, result, inputs) <= cap < after.reserved  # as much as it would take, if it might
    assert after.peak < 0.97 * budget  # the first plan, closer to the budget, would not have trained
    assert not any("fragmented" in note for note in result.report.notes)


def test_memory_in_one_piece_trains_where_pieces_would_not(inputs: Tensor) -> None:
    result = planned(inputs, budget="50%")
    budget = result.report.budget or 0
    cap = int(1.02 * budget)
    (note,) = (note for note in result.report.notes if "fragmented" in note)
    (total,) = re.findall(r"make_room\((\d+), x\)", programs(result)[""].source)
    assert int(total) <= budget
    assert f"lets PyTorch hold {format_bytes(int(total))}" in note
    assert result.report.predicted_after.peak <= budget
    assert reserved_under(cap, result, inputs) <= cap
    with mock.patch.object(Allocator, "make_room"):
        assert reserved_under(cap, result, inputs) > cap


def test_where_fragmentation_leaves_no_room_the_report_says_so(inputs: Tensor) -> None:
    result = planned(inputs, budget="44.5%")
    budget = result.report.budget or 0
    cap = int(1.02 * budget)
    (note,) = (note for note in result.report.notes if "fragmented" in note)
    assert f"no more than {format_bytes(cap)}" in note
    assert f"{format_bytes(reserved_under(cap, result, inputs))} would do" in note
    assert "expandable_segments:True" in note
    assert 0.97 * budget < result.report.predicted_after.peak <= budget < cap < reserved_under(cap, result, inputs)


def test_one_piece_reaches_a_budget_of_reserved_bytes_that_pieces_do_not(inputs: Tensor) -> None:
    result = planned(inputs, budget="45%", reserved=True)
    report = result.report
    assert report.predicted_after.peak < report.held <= (report.budget or 0)
    assert any("in one piece" in note for note in report.notes)
    with mock.patch.object(Allocator, "make_room"):
        assert reserved_under(None, result, inputs) > (report.budget or 0)
    assert optimized(inputs, budget="min", reserved=True).held <= report.held


def test_smaller_batches_between_stay_within_a_budget_of_reserved_bytes(inputs: Tensor) -> None:
    result = planned(inputs, budget="94%", reserved=True)
    budget = result.report.budget or 0
    assert result.report.predicted_after.reserved <= budget
    assert reserved_under(budget, result, inputs) <= budget  # 1.45 GB of 1.35 by the first plan that was


@pytest.mark.parametrize("more", [2 * 2**20, 20 * 2**20])
def test_a_process_that_reserves_more_than_simulated_gets_less_in_one_piece(
    inputs: Tensor, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Measured] = []

    def on_device(module: nn.Module, *_: object, **__: object) -> Measured:
        found = simulated(module, inputs)
        seen.append(Measured(found.peak, found.reserved + more, 1.0, (), "cuda"))
        return seen[-1]

    monkeypatch.setattr(bench, "device_type", lambda *args: "cuda")
    monkeypatch.setattr(measuring, "measure", on_device)
    # What else would fit takes several plans to say, which nobody asks for here.
    monkeypatch.setattr(run, "infeasible", lambda *given: BudgetInfeasibleError("", min(given[3:])))
    asked = {"passes": ["checkpoint_segments", "inplace_activation"], "reserved": True}  # tiles would leave more of it
    try:
        report = optimized(inputs, budget="45%", **asked)
    except BudgetInfeasibleError as error:
        report = optimized(inputs, budget=error.lowest, **asked)
    assert (report.budget or 0) - 5 * 2**20 <= seen[-1].reserved <= (report.budget or 0)


@pytest.mark.parametrize("more", [0, 100_000_000])
def test_plans_are_measured_one_by_one_only_where_the_last_takes_more_than_simulated(
    inputs: Tensor, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these, none is measured that is known to take more than the budget."""
    seen: list[int] = []

    def on_device(module: nn.Module, *_: object, **__: object) -> Measured:
        found = simulated(module, inputs)
        seen.append(found.peak + more)
        return Measured(found.peak + more, found.reserved, 1.0, (), "cuda")

    monkeypatch.setattr(bench, "device_type", lambda *args: "cuda")
    monkeypatch.setattr(measuring, "measure", on_device)
    asked: dict[str, Any] = {"passes": ["checkpoint_segments"], "budget": "49%"}
    report = optimized(inputs, **asked)
    budget = report.budget or 0
    assert seen[-1] == report.predicted_after.peak + more <= budget
    if not more:
        assert len(seen) == 1
        return
    assert seen[0] > budget
    assert len(seen) > 2
    assert max(seen) - more <= 0.998 * budget


def test_an_infeasible_budget_says_the_lowest_reserved_peak(inputs: Tensor) -> None:
    said = r"fits 100\.0 MB \(95\.4 MiB\) reserved: the lowest reserved"
    with pytest.raises(BudgetInfeasibleError, match=said) as e:
        optimized(inputs, layers=2, budget=Budget(bytes=100_000_000, reserved=True))
    reached = optimized(inputs, layers=2, budget=e.value.lowest, reserved=True)
    assert e.value.lowest == reached.predicted_after.reserved


def test_on_the_cpu_nothing_is_reserved() -> None:
    words = re.escape('Nothing is reserved on the CPU; leave out reserved, or plan for CUDA with device "cuda".')
    with pytest.raises(UsageError, match=words):
        memrewrite.optimize(nn.Linear(2, 2), torch.zeros(1, 2), budget="60%", reserved=True)


def test_reserved_without_a_budget_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reserved says what a budget bounds, and there is none; give a budget"):
        memrewrite.optimize(nn.Linear(2, 2), torch.zeros(1, 2), reserved=True)
    (tmp_path / "model.py").write_text("")
    found = CliRunner().invoke(main, ["optimize", str(tmp_path / "model.py"), "--reserved"], standalone_mode=False)
    assert "--reserved says what the budget bounds; give --budget" in str(found.exception)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(bytes=8 * 10**9, reserved=True), "8.00 GB (7.45 GiB) reserved"),
        (Budget(share=0.5, reserved=True), "50% of the original reserved"),
        (Budget(share=0.5), "50% of the original peak"),
        (Budget(minimum=True, reserved=True), "min reserved"),
    ],
    ids=str,
)
def test_a_budget_says_what_it_bounds(budget: Budget, text: str) -> None:
    assert str(budget) == text
