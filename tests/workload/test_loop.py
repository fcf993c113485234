"""The loop a step runs in: what is simulated is what a loop takes that is written by hand, and plans keep to it."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import nn

import memrewrite
from memrewrite import cli
from memrewrite.records.errors import UsageError
from memrewrite.records.loop import HABITS, Loop
from memrewrite.report import estimate_table, tables
from memrewrite.simulate import run_tracked, simulate
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.workload import make_step
from tests.support import loops
from tests.support.loops import CASES, made, step_of

# Every loop and every model, each model in loops of both kinds: with more than the tutorial's, and with less.
PLANNED = [
    ("tutorial", "unet"),
    ("tutorial", "language model"),
    ("tutorial", "cnn"),
    ("drop-output", "language model"),
    ("zero-before-backward", "cnn"),
    ("zero-in-place", "unet"),
    ("prefetch", "unet"),
    ("scaler", "cnn"),
    ("ema", "language model"),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loop", loops.LOOPS)
def test_a_simulated_step_takes_what_the_written_loop_takes(loop: str, name: str) -> None:
    model, x, y, criterion = made(name)
    step = step_of(loop, criterion, y)
    simulated = simulate(model, Inputs((x,), {}), step)
    assert simulated.peak == loops.peak_of(loops.LOOPS[loop], model, torch.optim.AdamW, criterion, x, y)
    assert simulated == run_tracked(copy.deepcopy(model), Inputs((x,), {}), step)
    assert sum(simulated.categories.values()) == simulated.peak


@pytest.mark.parametrize("name", CASES)
def test_accumulation_in_the_tutorials_loop(name: str) -> None:
    model, x, y, criterion = made(name)
    simulated = simulate(model, Inputs((x,), {}), step_of("tutorial", criterion, y, micro_batches=2))
    assert simulated.peak == loops.peak_of(loops.accumulate, model, torch.optim.AdamW, criterion, x, y, first=3)


@pytest.mark.parametrize("name", CASES)
def test_inference_keeps_the_last_output_while_the_next_forward_runs(name: str) -> None:
    model, x, y, criterion = made(name)
    model.eval()
    kept = simulate(model, Inputs((x,), {}), Step("inference"))
    assert kept.peak == loops.peak_of(loops.evaluate, model, torch.optim.SGD, criterion, x, y[:0])
    dropped = simulate(model, Inputs((x,), {}), Step("inference", loop=Loop.parse("drop-output")))
    assert kept.peak - dropped.peak == kept.held == -(-model(x).nbytes // 512) * 512


@pytest.mark.parametrize(("loop", "name"), PLANNED)
def test_a_plan_is_within_its_budget_in_the_loop_it_is_for(loop: str, name: str) -> None:
    model, x, y, criterion = made(name)
    step = step_of(loop, criterion, y)
    budget = int(CASES[name].budget * loops.peak_of(loops.LOOPS[loop], model, torch.optim.AdamW, criterion, x, y))
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loss_fn": step.loss_fn, "loop": loop}
    optimized = memrewrite.optimize(model, x, budget=budget, verify=False, **options)
    peak = loops.peak_of(loops.LOOPS[loop], optimized, torch.optim.AdamW, criterion, x, y)
    assert peak == optimized.report.predicted_after.peak <= budget
    assert optimized.report.config["loop"] == loop


class Both:
    """Two optimizers as a loop has them, by one name."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self, **how: Any) -> None:
        for each in self.optimizers:
            each.zero_grad(**how)


def over_the_head(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(parameters[-2:])]


def muon_and_adamw(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others)]


def two_of_three(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(parameters[:3]), torch.optim.SGD(parameters[6:], lr=0.1, momentum=0.9)]


def in_unlike_groups(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "amsgrad": True}]
    return [torch.optim.AdamW(groups, foreach=True)]


@pytest.mark.parametrize("loop", ["tutorial", "zero-before-backward", "zero-in-place"])
@pytest.mark.parametrize(
    "optimizers", [over_the_head, muon_and_adamw, two_of_three, in_unlike_groups], ids=lambda each: each.__name__
)
def test_optimizers_step_the_parameters_that_they_have(optimizers: Any, loop: str) -> None:
    model, x, y, criterion = made("language model")
    given = optimizers([*model.parameters()])
    options: dict[str, Any] = {"optimizer": given[0] if len(given) == 1 else given, "loop": loop}
    options["loss_fn"] = step_of("", criterion, y).loss_fn
    optimized = memrewrite.optimize(model, x, budget="60%", **options)

    def of_loop(parameters: Any) -> Any:
        return Both(*optimizers([*parameters]))

    peak = loops.peak_of(loops.LOOPS[loop], optimized, of_loop, criterion, x, y)
    assert peak == optimized.report.predicted_after.peak <= (optimized.report.budget or 0)
    assert optimized.report.equivalent
    assert memrewrite.verify(model, optimized, x, **options).equivalent


def test_parameters_of_what_is_compiled_have_their_own_names() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": [model[2].weight]}]
    optimizer = torch.optim.Adam(groups)
    step = make_step(model, optimizer, None, None, None)
    compiled: Any = nn.Sequential(*map(cast(Any, torch.compile), model))
    assert make_step(compiled, optimizer, None, None, None).groups == step.groups
    assert make_step(compiled, optimizer, None, None, None).left == step.left == {"2.bias"}
    made = step.make_optimizer(compiled)
    assert made is not None
    assert [len(group["params"]) for group in made.param_groups] == [2, 1]
    assert step.left_in(compiled) == [model[2].bias]


@pytest.mark.parametrize("together", [True, False], ids=["one", "two"])
def test_an_optimizer_of_what_the_loss_learns(together: bool) -> None:
    model, x, y = (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128)),
        torch.randn(64, 64),
        torch.arange(64),
    )
    centers = nn.Parameter(torch.randn(100, 128))

    def criterion(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output @ centers.t(), y)

    def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
        if together:
            return [torch.optim.AdamW([*parameters, centers])]
        return [torch.optim.AdamW(parameters), torch.optim.SGD([centers], lr=0.1, momentum=0.9)]

    options: dict[str, Any] = {
        "optimizer": optimizers(model.parameters()),
        "loss_fn": lambda output: criterion(output, y),
    }
    before, gradient = centers.detach().clone(), torch.ones_like(centers)
    centers.grad = gradient
    report = memrewrite.optimize(model, x, **options).report
    assert memrewrite.measure(model, x, **options, steps=1).peak == report.predicted_after.peak
    assert torch.equal(centers, before)
    assert centers.grad is gradient
    assert gradient.sum() == gradient.numel()
    centers.grad = None
    peak = loops.peak_of(loops.tutorial, model, lambda given: cast(Any, Both(*optimizers(given))), criterion, x, y)
    assert peak == report.predicted_after.peak


@pytest.mark.parametrize("loop", ["tutorial", "zero-before-backward"])
def test_a_loss_that_names_the_weights_makes_no_gradients_besides(loop: str) -> None:
    model, x, y, criterion = made("language model")

    def regular(model: nn.Module) -> Any:
        return 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())

    weight = model.get_parameter("head.weight")
    weight.grad = given = torch.ones_like(weight)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loop": loop}
    loss_fn = lambda output: criterion(output, y) + regular(model)  # noqa: E731
    result = memrewrite.optimize(model, x, budget="60%", loss_fn=loss_fn, **options)
    assert weight.grad is given
    model.zero_grad()
    assert result.report.equivalent
    assert memrewrite.measure(result, x, loss_fn=loss_fn, steps=1, **options).peak == result.report.predicted_after.peak
    for device in ("cpu", "cuda"):
        assert memrewrite.estimate(model, x, loss_fn=loss_fn, device=device, **options).peak.bytes
    assert weight.grad is None


@pytest.mark.parametrize("name", ["unet", "language model"])
def test_a_plan_for_a_loop_that_keeps_less_is_over_its_budget(name: str) -> None:
    model, x, y, criterion = made(name)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loss_fn": step_of("", criterion, y).loss_fn}
    optimized = memrewrite.optimize(model, x, budget="min", loop="drop-output", verify=False, **options)
    promised = optimized.report.predicted_after.peak
    assert loops.peak_of(loops.drop_output, optimized, torch.optim.AdamW, criterion, x, y) == promised
    assert loops.peak_of(loops.tutorial, optimized, torch.optim.AdamW, criterion, x, y) > 1.03 * promised


TEXTS = {
    "": "tutorial",
    "tutorial": "tutorial",
    " drop-output , prefetch ": "drop-output,prefetch",
    "prefetch=1": "prefetch",
    "prefetch=3,ema": "prefetch=3,ema",
    "ema,scaler,zero-in-place": "zero-in-place,scaler,ema",
    "tutorial,scaler": "scaler",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_loop_is_written_as_it_is_read(text: str) -> None:
    loop = Loop.parse(text)
    assert str(loop) == TEXTS[text]
    assert Loop.parse(str(loop)) == loop == Loop.parse(loop)


def test_every_habit_has_a_loop_of_its_own() -> None:
    read = {name: Loop.parse(name) for name in HABITS}
    assert [str(loop) for loop in read.values()] == list(HABITS)
    assert len({*read.values(), Loop()}) == len(HABITS) + 1


REFUSED = {
    "drop-outputs": "The loop habit 'drop-outputs' is unknown; known are tutorial, drop-output, zero-before-backward, "
    "zero-in-place, prefetch, scaler and ema.",
    "prefetch=0": "The loop habit 'prefetch=0' is unknown",
    "zero-in-place,zero-before-backward": "A loop frees gradients in one way",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_loop_that_means_nothing_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=re.escape(REFUSED[text])):
        Loop.parse(text)
    assert cli.run(["estimate", "examples/unet.py", "--loop", text]) == 2
    assert REFUSED[text] in capsys.readouterr().err


def test_a_loop_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="Loop 3 is not text"):
        memrewrite.measure(nn.Linear(2, 2), torch.ones(1, 2), loop=3)  # type: ignore[arg-type]


def test_what_a_loop_keeps_is_named_with_the_loop_that_does_not() -> None:
    loop = Loop.parse("zero-before-backward,prefetch=2,scaler,ema")
    assert {habit.words: str(habit.loop) for habit in loop.keeps()} == {
        "keeping the output": "drop-output,zero-before-backward,prefetch=2,scaler,ema",
        "loading the next 2 batches ahead": "zero-before-backward,scaler,ema",
        "zero_grad before backward": "prefetch=2,scaler,ema",
        "the gradient scaler": "zero-before-backward,prefetch=2,ema",
        "the average of the weights": "zero-before-backward,prefetch=2,scaler",
    }
    assert [habit.words for habit in loop.keeps("inference")] == [
        "keeping the output",
        "loading the next 2 batches ahead",
    ]
    assert not list(Loop.parse("drop-output").keeps())


@pytest.mark.parametrize("loop", ["tutorial", "zero-before-backward,prefetch,scaler,ema"])
def test_the_report_says_what_each_habit_costs(loop: str) -> None:
    model, x, y, criterion = made("cnn")
    options: dict[str, Any] = {"optimizer": "adamw", "loss_fn": step_of("", criterion, y).loss_fn}
    report = memrewrite.optimize(model, x, loop=loop, verify=False, **options).report
    costs = {habit.words: habit.bytes for habit in report.habits}
    assert list(costs) == [habit.words for habit in Loop.parse(loop).keeps()]
    for habit in Loop.parse(loop).keeps():
        other = memrewrite.optimize(model, x, loop=habit.loop, verify=False, **options).report
        assert costs[habit.words] == report.predicted_after.peak - other.predicted_after.peak
    estimate = memrewrite.estimate(model, x, loop=loop, **options)
    assert [habit.words for habit in estimate.habits] == list(costs)
    text = f"the loop ({loop}) takes: keeping the output {costs['keeping the output']} B"
    console = Console(width=400, record=True, file=io.StringIO())
    tables.show(report, console)
    assert text in console.export_text()
    assert text.replace("B", "").split(" takes")[0] in report.to_html()
    estimate_table.show(estimate, console)
    assert f"the loop ({loop}) takes: " in console.export_text()


def test_a_loop_that_keeps_nothing_has_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _, _ = made("cnn")
    assert memrewrite.optimize(model, x, loop="drop-output", verify=False).report.habits == ()


def test_the_scaler_changes_no_gradient_and_is_verified_with() -> None:
    model, x, y, criterion = made("cnn")
    loss_fn = step_of("", criterion, y).loss_fn
    result = memrewrite.optimize(model, x, budget="70%", loop="scaler,zero-before-backward,ema", loss_fn=loss_fn)
    assert result.report.equivalent
    assert result.report.verdict.startswith("bit-equal")


def test_a_loop_is_a_setting_of_the_command_line_and_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = "from tests.support.models import ResidualNet, images\nget_model = ResidualNet\n"
    (tmp_path / "net.py").write_text(f"{net}get_inputs = lambda: images().args\n")
    monkeypatch.chdir(tmp_path)

    def estimated(*arguments: str) -> tuple[str, int]:
        assert cli.run(["estimate", "net.py", "-q", "--json", "-", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["loop"] == found["command"]["loop"] == str(Loop.parse(found["loop"]))
        return found["loop"], found["peak"]["bytes"]

    plain = estimated()
    ahead = estimated("--loop", "prefetch")
    assert (plain[0], ahead[0]) == ("tutorial", "prefetch")
    assert plain[1] < ahead[1]
    (tmp_path / "pyproject.toml").write_text('[tool.memrewrite]\nloop = "prefetch"\n')
    assert estimated() == ahead
    assert estimated("--loop", "tutorial") == plain
