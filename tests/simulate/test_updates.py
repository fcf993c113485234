"""An optimizer's step that was noted counts as it would if it ran once more: event by event, block by block."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, SparseAdam

import memrewrite.simulate as simulating
from memrewrite import estimate, measure, optimize
from memrewrite.records.errors import DataDependentError
from memrewrite.simulate import Timeline, requests, run_tracked, simulate
from memrewrite.simulate.fake.fakes import on_fakes
from memrewrite.simulate.memory import updates
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.eager import EAGER, Target
from memrewrite.workload.step import Inputs, Step
from tests.simulate.test_course import IMAGES, Convolved, loss_of
from tests.simulate.test_repeats import in_turn


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps of optimizers that ran, of which nothing is noted at first."""
    own, found = Step.update, list[str]()

    def update(step: Step, optimizer: torch.optim.Optimizer) -> None:
        found.append(type(optimizer).__name__)
        own(step, optimizer)

    monkeypatch.setattr(Step, "update", update)
    monkeypatch.setattr(updates, "_KNOWN", {})
    return found


def seen(step: Step) -> tuple[Timeline, Any]:
    module = Convolved()
    return simulate(module, IMAGES, step, attribute=True), in_turn(requests(module, IMAGES, step))


def step_with(optimizer: Callable[..., Any], target: Target = EAGER) -> Step:
    return Step("train", optimizer, loss_of, target=target)


def ran_each_time(step: Step, monkeypatch: pytest.MonkeyPatch) -> tuple[Timeline, Any]:
    with monkeypatch.context() as patched:
        patched.setattr(simulating, "updates_repeated", lambda trackers: nullcontext())
        return seen(step)


@pytest.mark.parametrize("target", [EAGER, CUDA_FROM_CPU])
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD,  # which has no state, so that each step is its first
        functools.partial(SGD, momentum=0.9, foreach=False),
        functools.partial(SGD, momentum=0.9, nesterov=True),
        Adam,
        functools.partial(Adam, amsgrad=True, foreach=False),
        functools.partial(torch.optim.AdamW, betas=(0.8, 0.9)),
        functools.partial(torch.optim.AdamW, fused=True),
        lambda trained: Adam([{"params": trained[:2], "lr": 0.1}, {"params": trained[2:]}]),
    ],
)
def test_a_step_counts_again_as_it_ran(
    optimizer: Any, target: Target, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_with(optimizer, target)
    expected = ran_each_time(step, monkeypatch)
    each_time = len(ran)
    for _ in range(2):
        assert seen(step) == expected
        assert len(ran) == each_time + (1 if optimizer is SGD else 2)  # the first and a later one


def hooked(trained: Any) -> torch.optim.Optimizer:
    optimizer = Adam(trained)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


def scheduled(trained: Any) -> torch.optim.Optimizer:
    optimizer = Adam(trained)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return optimizer


class Own(Adam):
    """Could do anything."""


@pytest.mark.parametrize(
    "optimizer", [hooked, scheduled, Own, torch.optim.RAdam, lambda trained: SGD(trained, torch.tensor(0.1))]
)
def test_what_may_do_more_runs_each_time(optimizer: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_with(optimizer)
    expected = ran_each_time(step, monkeypatch)
    each_time = len(ran)
    for times in (2, 3):
        assert seen(step) == expected
        assert len(ran) == times * each_time


def test_with_other_settings_or_gradients_it_runs(ran: list[str]) -> None:
    for optimizer in (Adam, functools.partial(Adam, amsgrad=True), functools.partial(Adam, lr=0.5)):
        seen(step_with(optimizer))
    assert len(ran) == 6
    module = Convolved()
    module.first.weight.requires_grad_(False)
    simulate(module, IMAGES, step_with(Adam))
    assert len(ran) == 8


@pytest.mark.parametrize(
    "optimizer", [Adam, functools.partial(Adam, foreach=False), functools.partial(Adam, fused=True)]
)
def test_from_a_state_that_was_noted_later_steps_run(
    optimizer: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_with(optimizer)
    expected = ran_each_time(step, monkeypatch)
    simulate(Convolved(), IMAGES, step, steps=1)
    before = len(ran)
    assert seen(step) == expected
    assert len(ran) == before + 1  # a later one


class Sparse(nn.Module):
    """Its gradient has no strides."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1000, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x).sum()


@pytest.mark.parametrize("optimizer", [SGD, lambda parameters: SparseAdam([*parameters])], ids=["SGD", "SparseAdam"])
def test_gradients_that_are_sparse_are_counted_as_steps_run(optimizer: Any) -> None:
    model, x = Sparse(), torch.arange(2000).remainder(1000)
    with pytest.raises(DataDependentError, match="how much a sparse tensor holds"):
        simulate(model, Inputs((x,), {}), Step("train", optimizer))
    taken = measure(model, x, optimizer=optimizer, steps=1).peak
    assert estimate(model, x, optimizer=optimizer).peak.bytes == taken
    assert optimize(model, x, optimizer=optimizer, budget="100%").report.predicted_before.peak == taken


def test_real_tensors_are_written_each_time(ran: list[str]) -> None:
    step, inputs = Step("train", SGD), Inputs((torch.randn(4, 8),), {})
    module = nn.Linear(8, 8)
    simulate(module, inputs, step)
    simulate(module, inputs, step)
    weight = module.weight.detach().clone()
    run_tracked(module, inputs, step)  # two steps
    assert len(ran) == 3  # one of them on fake tensors
    assert not torch.equal(weight, module.weight)


def test_state_that_shares_memory_is_not_made_again() -> None:
    class Halves(SGD):
        def step(self, closure: Any = None) -> Any:
            whole = torch.zeros(8)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("half", whole[:4])

    module, inputs, step = nn.Linear(2, 2), Inputs((torch.randn(3, 2),), {}), Step("train", Halves)
    with pytest.MonkeyPatch.context() as patched, on_fakes(module, inputs, EAGER, True, None, None) as (twin, fakes):
        patched.setattr(updates, "_STEADY", (Halves,))
        expected = run_tracked(twin, fakes, step)
        first = [known for asked, known in updates._KNOWN.items() if not asked[5]]  # there was no state yet
        assert first == [None]
        assert run_tracked(twin, fakes, step).peak == expected.peak
