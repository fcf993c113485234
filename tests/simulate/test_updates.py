"""An optimizer's step that was noted counts as it would if it ran once more, also for another program of the model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.simulate import Noted, simulate
from memrewrite.simulate.memory.updates import Update
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.eager import EAGER, Target
from memrewrite.workload.step import Inputs, OptimizerFactory, Step

ROWS = Inputs((torch.randn(16, 64),), {})
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": torch.optim.AdamW,
    "one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.5, centered=True),
}


class Own(torch.optim.AdamW):
    """Of no class of PyTorch's: it may do anything."""


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def wrapped(parameters: Any) -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.AdamW(parameters)
    optimizer.step = optimizer.step
    return optimizer


def by_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    """The optimizers whose steps ran."""
    found: list[torch.optim.Optimizer] = []
    own = Step.update

    def update(step: Step, optimizer: torch.optim.Optimizer) -> None:
        found.append(optimizer)
        own(step, optimizer)

    monkeypatch.setattr(Step, "update", update)
    return found


def looked(module: nn.Module, step: Step, updates: dict[object, Update | None]) -> Any:
    both = step.target is CUDA_FROM_CPU
    return simulate(module, ROWS, step, both=both, noted=Noted(updates=updates, alike=True))


@pytest.mark.parametrize("target", [EAGER, CUDA_FROM_CPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_counts_again_as_it_ran(name: str, target: Target, ran: list[torch.optim.Optimizer]) -> None:
    step, updates = Step(optimizer=OPTIMIZERS[name], target=target), dict[object, Update | None]()
    expected = simulate(layers(), ROWS, step, both=target is CUDA_FROM_CPU)
    ran.clear()
    for module in (layers(), layers()):
        assert looked(module, step, updates) == expected
    assert (
        len(ran) == len(updates) == (1 if name in ("sgd", "adagrad") else 2)
    )  # whose second step finds what the first did
    attributed = simulate(layers(), ROWS, step, attribute=True)
    for _ in range(2):
        assert simulate(layers(), ROWS, step, attribute=True, noted=Noted(updates=updates, alike=True)) == attributed


def test_so_does_one_of_many_parameters(ran: list[torch.optim.Optimizer]) -> None:
    many, updates = nn.Sequential(*(nn.Linear(64, 64) for _ in range(150))), dict[object, Update | None]()
    for _ in range(2):
        looked(many, Step(optimizer=torch.optim.AdamW), updates)
    assert len(ran) == 2


@pytest.mark.parametrize("factory", [Own, hooked, wrapped, by_a_tensor])
def test_steps_that_may_do_something_else_run(factory: Callable[..., Any], ran: list[torch.optim.Optimizer]) -> None:
    step, updates = Step(optimizer=factory), dict[object, Update | None]()
    expected = simulate(layers(), ROWS, step)
    ran.clear()
    for _ in range(2):
        assert looked(layers(), step, updates) == expected
    assert len(ran) == 4
    assert not updates


def frozen(module: nn.Sequential) -> None:
    module[0].weight.requires_grad_(False)


def wider(module: nn.Sequential) -> None:
    module[1] = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))


def halved(module: nn.Sequential) -> None:
    module.double()


@pytest.mark.parametrize("change", [frozen, wider, halved])
def test_another_model_or_setting_is_another_step(
    change: Callable[[nn.Sequential], None], ran: list[torch.optim.Optimizer]
) -> None:
    step, updates, other = Step(optimizer=torch.optim.AdamW), dict[object, Update | None](), layers()
    looked(layers(), step, updates)
    change(other)
    inputs = Inputs((ROWS.args[0].double(),), {}) if change is halved else ROWS
    noted = Noted(updates=updates, alike=True)
    assert simulate(other, inputs, step, noted=noted) == simulate(other, inputs, step)
    again = replace(step, optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    assert looked(layers(), again, updates) == simulate(layers(), ROWS, again)
    assert len(updates) == 6


def test_a_gradient_that_is_none_is_another_step() -> None:
    class Branching(nn.Module):
        """Has the parameters of two layers, of which a flag of its own says which are used."""

        def __init__(self, used: int) -> None:
            super().__init__()
            self.layers, self.used = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), used

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[self.used](x)

    step, updates = Step(optimizer=torch.optim.AdamW), dict[object, Update | None]()
    for used in (0, 1, 0):
        assert looked(Branching(used), step, updates) == simulate(Branching(used), ROWS, step)
    assert len(updates) == 4


def test_a_step_under_way_is_not_taken_for_the_first() -> None:
    """The second one finds a state, and makes none."""
    updates: dict[object, Update | None] = {}
    looked(layers(), Step(optimizer=torch.optim.AdamW), updates)
    first, second = updates.values()
    assert first is not None
    assert second is not None
    assert len(first.state) == 4
    assert not second.state
