"""What else would fit: every peak that is told is that of a real step, and costs are said where they are."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import memrewrite
from memrewrite import advice, cli
from memrewrite.advice import Variants, options
from memrewrite.advice.optimizers import frugal
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.records.loop import Loop
from memrewrite.records.outcomes import Option
from memrewrite.simulate import run_tracked, simulate
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.workload.in_groups import making_groups
from memrewrite.workload.optimizers import OptimizerFactory
from memrewrite.workload.step import Inputs, Step, evaluating
from memrewrite.workload.stepspec import optimizer_factory
from tests.support.models import ResidualNet, SwishNet, images, rows

NO_WORKSPACES = {"train": 0, "inference": 0}
ADAMW = Step(optimizer=torch.optim.AdamW)


def asked(module: nn.Module, inputs: Inputs, step: Step, share: float) -> tuple[int, dict[str, Option]]:
    """The options for ``share`` of the peak, by what their names begin with."""
    now = simulate(module, inputs, step).peak
    found = options(Variants(module, inputs, step, NO_WORKSPACES), int(share * now), now)
    return now, {option.name: option for option in found}


def named(found: dict[str, Option], word: str) -> Option:
    (option,) = (option for name, option in found.items() if name.startswith(word))
    return option


def real(module: nn.Module, inputs: Inputs, step: Step) -> int:
    """The peak of real steps, as they are tracked."""
    module = copy.deepcopy(module)
    with evaluating(module) if step.mode == "inference" else torch.enable_grad():
        return run_tracked(module, inputs, step).peak


@pytest.fixture(scope="module")
def residual() -> dict[str, Option]:
    return asked(ResidualNet(), images(8), ADAMW, 0.7)[1]


@pytest.mark.parametrize(
    ("word", "step"),
    [
        ("bfloat16 autocast", replace(ADAMW, amp=torch.bfloat16)),
        ("SGD with momentum", replace(ADAMW, optimizer=optimizer_factory("sgd-momentum"))),
        ("SGD without momentum", replace(ADAMW, optimizer=torch.optim.SGD)),
        ("both bfloat16 autocast and SGD", replace(ADAMW, amp=torch.bfloat16, optimizer=torch.optim.SGD)),
        ('optimizer_step="in_backward" (--optimizer', replace(ADAMW, in_backward=True)),
        ("evaluation", Step("inference")),
        ("zero_grad(set_to_none=False)", replace(ADAMW, loop=Loop.parse("zero-in-place"))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_peak_is_that_of_a_real_step(word: str, step: Step, residual: dict[str, Option]) -> None:
    assert named(residual, word).peak_bytes == real(ResidualNet(), images(8), step)


def test_micro_batches_find_the_gradients_of_those_before() -> None:
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    inputs = Inputs((torch.ones(512, 64),), {})
    _, found = asked(module, inputs, ADAMW, 0.7)
    option = named(found, "2 micro-batches of 256")
    half = Inputs((torch.ones(256, 64),), {})
    assert option.fits
    assert option.peak_bytes == real(module, half, replace(ADAMW, micro_batches=2))
    gradients = sum(p.numel() * 4 for p in module.parameters())
    assert option.peak_bytes > real(module, half, ADAMW)
    new = 64 * 64 * 4 + 2 * 512  # the gradient that is added to one of those, and granules
    assert option.peak_bytes <= real(module, half, ADAMW) + gradients + new
    assert option.cost == "2 forward and backward passes for each optimizer step"


def test_a_larger_batch_that_fits_where_no_gradients_wait_is_told() -> None:
    module, inputs = SwishNet(width=32, depth=6), rows(512)
    now, found = asked(module, inputs, ADAMW, 0.3)
    assert named(found, "8 micro-batches of 64").fits
    lower = named(found, "batch 128 (--batch-size 128)")
    assert lower.peak_bytes == real(module, rows(128), ADAMW) <= 0.3 * now
    assert lower.peak_bytes < real(module, rows(128), replace(ADAMW, micro_batches=2))


def test_batch_normalization_is_spoken_of_only_where_it_is() -> None:
    for module, told in ((ResidualNet(), True), (ResidualNet().eval(), False)):
        step = ADAMW if told else replace(ADAMW, optimizer=None)
        _, found = asked(module, images(64), step, 0.8)
        micro = next(option for name, option in found.items() if "micro-batches" in name)
        assert ("batch normalization" in micro.cost) == told
        first = next(iter(found))
        assert ("micro-batches" in first) != told  # the cheapest, unless it changes the statistics


def test_what_fits_stands_first_and_all_that_is_tried_is_told() -> None:
    module, inputs = SwishNet(width=64, depth=2), Inputs((torch.randn(16, 64),), {})  # mostly parameters
    now, found = asked(module, inputs, ADAMW, 0.6)
    others = [option for option in found.values() if not option.name.startswith(("evaluation", "zero_grad"))]
    assert [option.fits for option in others] == sorted((option.fits for option in others), reverse=True)
    assert {option.fits for option in others} == {True, False}
    assert all(option.peak_bytes < now for option in others)
    careless = named(found, "zero_grad")
    assert careless.peak_bytes > now
    assert "more than this step" in careless.cost


def test_all_of_it_together_where_nothing_else_fits() -> None:
    module = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
    now, found = asked(module, Inputs((torch.ones(256, 64),), {}), ADAMW, 0.3)
    together = [name for name in found if "micro-batches" in name and "autocast and SGD" in name]
    assert len(together) == 1
    assert now > found[together[0]].peak_bytes


def perceptron(layers: int = 6, width: int = 512) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())])


@pytest.mark.parametrize(
    ("optimizer", "name", "frugally"),
    [
        (torch.optim.AdamW, "AdamW with fused=True", partial(torch.optim.AdamW, fused=True)),
        (torch.optim.NAdam, "NAdam with foreach=False", partial(torch.optim.NAdam, foreach=False)),
    ],
)
def test_other_kernels_come_first_where_the_optimizers_step_takes_most(
    optimizer: Callable[..., torch.optim.Optimizer], name: str, frugally: OptimizerFactory
) -> None:
    module, inputs = perceptron(), rows(64, 512)
    step = Step(optimizer=partial(optimizer, foreach=True))  # on CUDA the default
    timeline = simulate(module, inputs, step)
    assert timeline.peak_of_passes < timeline.peak_of_optimizer
    _, found = asked(module, inputs, step, 0.95)
    assert next(iter(found)) == name
    assert found[name].fits
    assert found[name].peak_bytes == real(module, inputs, replace(step, optimizer=frugally))
    assert not any("micro-batches" in other for other in found)  # which do not lower the optimizer's step


def test_the_step_in_groups_stands_where_foreach_kernels_make_much(monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_groups = partial(making_groups, most=2**18)
    monkeypatch.setattr(advice, "making_groups", in_small_groups)
    module, inputs = perceptron(), rows(64, 512)
    made = partial(torch.optim.AdamW, foreach=True)
    step = Step(optimizer=made)
    _, found = asked(module, inputs, step, 0.95)
    grouped = named(found, 'optimizer_step="grouped"')
    assert grouped.peak_bytes == real(module, inputs, replace(step, optimizer=in_small_groups(made)))
    assert grouped.fits


def test_they_come_with_smaller_batches_where_neither_is_enough() -> None:
    module, inputs = perceptron(), rows(1024, 512)
    step = Step(optimizer=partial(torch.optim.AdamW, foreach=True), loop=Loop.parse("drop-output"))
    now, found = asked(module, inputs, step, 0.8)
    both = named(found, "8 micro-batches of 128 with gradient accumulation, with fused=True")
    halves = replace(step, optimizer=partial(torch.optim.AdamW, fused=True), micro_batches=2)
    assert both.fits
    assert both.peak_bytes == real(module, rows(128, 512), halves)
    assert not named(found, "1024 micro-batches of 1").fits
    assert simulate(module, inputs, replace(halves, micro_batches=1)).peak == now


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        partial(torch.optim.Adam, fused=True),
        partial(torch.optim.NAdam, foreach=False),
        torch.optim.LBFGS,  # has neither
    ],
)
def test_there_are_none_where_the_setting_is_unknown_or_made(optimizer: OptimizerFactory | None) -> None:
    assert frugal(nn.Linear(2, 2), Step(optimizer=optimizer)) is None


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_command_line_has_a_name_for_them(name: str) -> None:
    kernels = frugal(nn.Linear(2, 2), Step(optimizer=optimizer_factory(name)))
    assert kernels is not None
    assert kernels.advice.endswith(f"(--optimizer {name}-fused)")
    assert frugal(nn.Linear(2, 2), Step(optimizer=optimizer_factory(f"{name}-fused"))) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_a_budget_below_the_optimizers_step_is_refused_with_the_peaks_of_a_plan_within_it(compiled: bool) -> None:
    module, inputs = perceptron(24, 256), rows(768, 256)
    workspaces = CUDA_FROM_CPU.workspace_bytes(torch.device("cpu"), None, "train")
    steps = (Step(optimizer=optimizer_factory(name), target=CUDA_FROM_CPU) for name in ("adamw", "adamw-fused"))
    foreach, fused = (simulate(module, inputs, step, workspace_bytes=workspaces) for step in steps)
    alone = foreach.peak_of_optimizer
    assert alone < fused.peak  # of forward and backward without a plan
    budget = alone - 1_000_000
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(module, inputs.args, budget=budget, device="cuda", compiled=compiled, verify=False)
    found = {option.name: option for option in caught.value.options}
    assert caught.value.lowest == alone
    assert "uncompiled" not in caught.value.summary  # where the optimizer takes as much
    assert budget >= named(found, "AdamW with fused=True (--optimizer adamw-fused)").peak_bytes


def test_a_loop_that_keeps_less_stands_first() -> None:
    module = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 2048))
    step = Step(optimizer=torch.optim.SGD, loop=Loop.parse("prefetch,ema"))
    now, found = asked(module, Inputs((torch.ones(512, 16),), {}), step, 0.8)
    first, option = next(iter(found.items()))
    assert first == "not keeping the output (--loop drop-output,prefetch,ema)"
    assert option.cost == "nothing but a change of the loop"
    dropping = replace(step, loop=Loop.parse("drop-output,prefetch,ema"))
    assert option.peak_bytes == real(module, Inputs((torch.ones(512, 16),), {}), dropping) < now
    assert not any("prefetch,ema" not in name for name in found if name.startswith("not "))  # ema is training itself


def test_nobody_is_told_to_do_what_they_do() -> None:
    _, found = asked(ResidualNet(), images(8), Step(optimizer=torch.optim.SGD), 0.7)
    assert [name for name in found if "autocast" in name] == ["bfloat16 autocast (--amp bf16)"]
    assert not any("SGD" in name for name in found)


def test_inference_has_smaller_batches_alone() -> None:
    module, inputs = ResidualNet().eval(), images(16)
    _, found = asked(module, inputs, Step("inference"), 0.6)
    ((name, option),) = found.items()
    assert name.startswith("2 batches of 8")
    assert option.peak_bytes == real(module, images(8), Step("inference"))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_inference_budget_that_no_program_meets(compiled: bool) -> None:
    x, loop = rows(4096, 512).args, Loop.parse("drop-output")
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(perceptron().eval(), x, budget="20MB", compiled=compiled, loop=loop, verify=False)
    (option,) = caught.value.options
    assert option.name == "2 batches of 2048"
    assert option.peak_bytes == real(perceptron().eval(), rows(2048, 512), Step("inference", loop=loop))


def test_batches_of_one_are_told_of_though_the_program_is_for_more() -> None:
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(ResidualNet().eval(), images(2).args, budget="75%", verify=False)
    (option,) = (option for option in caught.value.options if option.fits)
    assert option.name == "2 batches of 1"
    assert option.peak_bytes == real(ResidualNet().eval(), images(1), Step("inference"))


def test_the_error_of_a_budget_carries_the_options() -> None:
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(SwishNet(depth=6), rows(512).args, budget=120_000, verify=False)
    error = caught.value
    assert error.options
    fitting = [option for option in error.options if option.fits]
    assert len(error.advice) == max(len(fitting), 1)
    assert all(option.name in line for option, line in zip(fitting, error.advice, strict=False))
    assert str(error) == "\n".join([error.summary, *error.advice])


class Within(nn.Module):
    """Enters autocast in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = self.layers(x)
        return result


def test_what_keeps_a_plan_from_what_it_is_for_is_named_with_what_to_do() -> None:
    with pytest.raises(BudgetInfeasibleError, match="Within enters autocast in its own forward") as caught:
        memrewrite.optimize(Within(), torch.randn(512, 64), budget="60%")
    assert caught.value.summary.endswith('regions=["layers.*"] say. What else would fit:')


class Checked(Within):
    """Looks at the values of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.max()) > 1e9:
            raise ValueError("too large")
        result: torch.Tensor = self.layers(x)
        return result


def test_why_only_regions_are_rewritten_is_told_where_they_are_not_enough() -> None:
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(Checked(), torch.randn(512, 64), budget="10%")
    told = "Only regions are rewritten, because: Checked lets the values of a tensor decide what Python does at "
    assert told in caught.value.summary
    assert "in a small submodule, which stays a call, or outside forward. What else would fit:" in caught.value.summary


class Speaking(nn.Module):
    """Returns logits of 5,000 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5000, 16), nn.Linear(16, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


def test_logits_that_are_returned_are_named_and_need_not_be_there() -> None:
    tokens = torch.randint(5000, (8, 64))
    given: dict[str, Any] = {"loss_fn": lambda output: F.cross_entropy(output.flatten(0, 1), tokens.flatten())}
    told = r"Speaking returns logits of 10\.2 MB .*returns='lazy' .*makes some rows of them at a time"
    with pytest.raises(BudgetInfeasibleError, match=told):
        memrewrite.optimize(Speaking(), tokens, budget="60%", **given)
    assert memrewrite.optimize(Speaking(), tokens, budget="60%", returns="lazy", **given).report.equivalent


def layer() -> nn.Module:
    """A layer that stays a call, and an activation that writes over what it is given."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(8, 8, 3, padding=1)), nn.LeakyReLU(0.2, inplace=True))


def test_the_lowest_peak_may_be_that_of_the_model_as_it_is() -> None:
    model, x = nn.Sequential(layer(), layer(), layer()), torch.randn(8, 8, 16, 16)
    peak = memrewrite.estimate(model, x).peak
    with pytest.raises(BudgetInfeasibleError, match="of the model as it is") as caught:
        memrewrite.optimize(model, x, budget="60%")
    assert caught.value.lowest == peak.bytes
    assert all(option.peak_bytes < peak.bytes for option in caught.value.options if option.fits)


class Scattered(nn.Module):
    """Takes no autocast: a product in bfloat16 is scattered into float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(32).expand(len(x), 32)
        return torch.zeros(len(x), 64).scatter(1, places, self.layers(x)).tanh()


def test_what_cannot_be_done_is_tried_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(Scattered(), torch.randn(256, 32), budget="30%")
    assert not any("autocast" in option.name for option in caught.value.options)
    assert capfd.readouterr().err == ""


class Asserting(SwishNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 64
        return super().forward(x)


def test_a_forward_that_says_in_its_own_way_that_it_takes_no_smaller_batch() -> None:
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(Asserting(), rows(64).args, budget=1000)
    assert not any("micro-batches" in option.name for option in caught.value.options)


NET = """
from tests.support.models import SwishNet, rows

def get_model():
    return SwishNet(depth=6)

def get_inputs():
    return rows(512).args
"""


def test_the_command_line_shows_them_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "advised_net.py").write_text(NET)
    assert cli.run(["optimize", "advised_net.py", "--budget", "120KB", "-q"]) == 6
    said = capsys.readouterr().err
    lines = said.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("option"))
    assert lines[table].split() == ["option", "peak", "fits", "cost"]
    assert max(map(len, lines[table:])) <= 80
    assert "micro-batches" in " ".join(lines[table:])
    assert "No plan fits 120000 B" in said
