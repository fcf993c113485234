"""Steps that accumulate gradients: what they compute, and budgets that hold with the gradients that wait."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memrewrite
from memrewrite import cli
from memrewrite.records.errors import UsageError
from memrewrite.search.planning import search
from memrewrite.simulate import run_tracked, simulate
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.workload import make_step
from tests.support.dropins import candidate
from tests.support.models import ResidualNet, SwishNet, TinyTransformer, images, make, rows, tokens


def gradients_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("name", ["swish", "residual", "transformer"])
def test_gradients_add_up_as_in_a_loop(name: str) -> None:
    module, inputs = make(name)
    mine, theirs = copy.deepcopy(module), copy.deepcopy(module)
    told: list[str] = []
    optimizer = torch.optim.SGD(mine.parameters())
    torch.manual_seed(0)
    Step(optimizer=torch.optim.SGD, micro_batches=3).run(mine, inputs, optimizer, told.append)
    assert told == ["data", "forward", "loss", "backward", "step"]
    torch.manual_seed(0)
    for _ in range(3):
        theirs(*inputs.args, **inputs.kwargs).float().mean().backward()
    torch.optim.SGD(theirs.parameters()).step()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_what_is_simulated_is_what_is_tracked(amp: torch.dtype | None) -> None:
    module, inputs = make("residual")
    step = Step(optimizer=torch.optim.AdamW, amp=amp, micro_batches=2)
    assert simulate(module, inputs, step) == run_tracked(copy.deepcopy(module), inputs, step)
    more = Step(optimizer=torch.optim.AdamW, amp=amp, micro_batches=7)
    assert simulate(module, inputs, more) == simulate(module, inputs, step)  # the third finds what the second found
    once = simulate(module, inputs, Step(optimizer=torch.optim.AdamW, amp=amp))
    assert once.as_ends("data", 2) < simulate(module, inputs, step).as_ends("data", 2)


@pytest.mark.parametrize("budget", ["min", "80%"])
@pytest.mark.parametrize(
    ("model", "inputs"), [(SwishNet, rows), (ResidualNet, images), (TinyTransformer, tokens)], ids=lambda v: v.__name__
)
def test_budgets_hold_where_gradients_wait(
    model: Callable[[], nn.Module], inputs: Callable[[int], Inputs], budget: str
) -> None:
    module, given = model(), inputs(128).args
    result = memrewrite.optimize(module, given, budget=budget, optimizer="sgd", micro_batches=2)
    report = memrewrite.report_of(result)
    real = memrewrite.measure(result, given, optimizer="sgd", micro_batches=4, steps=1)
    assert real.peak == report.predicted_after.peak <= (report.budget or real.peak)
    assert report.segments
    assert report.equivalent
    assert report.config["micro_batches"] == 2
    assert memrewrite.verify(module, result, given, optimizer="sgd", micro_batches=3, steps=1).equivalent


def test_a_plan_for_one_batch_may_be_over_the_budget_of_several() -> None:
    module, x = SwishNet(width=32, depth=6), rows(64).args
    one = memrewrite.optimize(module, x, budget="min", verify=False)
    several = memrewrite.optimize(module, x, budget="min", micro_batches=2, verify=False)
    waiting = [memrewrite.measure(each, x, micro_batches=2, steps=1).peak for each in (one, several)]
    assert memrewrite.report_of(one).predicted_after.peak < min(waiting)
    assert waiting[1] <= waiting[0]
    assert waiting[1] == memrewrite.report_of(several).predicted_after.peak


def test_the_planner_counts_gradients_that_wait_among_what_no_plan_moves() -> None:
    module, inputs = make("swish")
    fixed = []
    for micro_batches in (1, 2):
        step = Step(optimizer=torch.optim.SGD, micro_batches=micro_batches)
        fixed.append(search(candidate(module, inputs, step), exact=False).fixed)
    assert fixed[1] - fixed[0] >= gradients_bytes(module)


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="A step cannot take 0 micro-batches; give at least 1"):
        make_step(nn.Linear(2, 2), "sgd", None, None, None, 0)


def test_the_command_line_accumulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def get_model():\n"
        "    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.SiLU()) for _ in range(6)))\n\n"
        "def get_inputs(batch_size=256):\n    return torch.randn(batch_size, 64)\n"
    )
    step: list[str] = ["--optimizer", "sgd", "-q", "--micro-batches", "4"]
    assert cli.run(["optimize", "net.py", *step, "--no-verify", "--budget", "min", "--json", "report.json"]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert report["config"]["micro_batches"] == 4
    assert report["measured_after"]["peak"] == report["predicted_after"]["peak"]
    assert report["measured_before"]["phases"] == report["predicted_before"]["phases"]
    assert cli.run(["estimate", "net.py", *step, "--json", "estimate.json"]) == 0
    estimate: dict[str, Any] = json.loads((tmp_path / "estimate.json").read_text())
    assert estimate["peak"]["bytes"] == report["predicted_before"]["peak"]
    assert cli.run(["optimize", "net.py", *step[:-2], "--no-verify", "--no-measure", "--json", "once.json"]) == 0
    once: dict[str, Any] = json.loads((tmp_path / "once.json").read_text())
    assert once["predicted_before"]["peak"] < report["predicted_before"]["peak"]
