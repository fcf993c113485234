"""An optimizer's step in groups has the bits of one that takes all parameters at once, and fewer bytes beside them."""

import copy
import functools
import pickle
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.optimizing.remembered import _optimizer
from memrewrite.records.errors import UsageError
from memrewrite.state.bits import same_bits
from memrewrite.workload.in_groups import MOST, InGroups, made_whole, making_groups
from memrewrite.workload.stepping import factory_like
from memrewrite.workload.stepspec import OPTIMIZERS, optimizer_factory

WIDTH = 40
LAYER = 4 * WIDTH * WIDTH
KINDS = [
    *(
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
    ),
    *(
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    ),
]


def net(layers: int = 6, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """After some steps under a scheduler."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, WIDTH)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return optimizer


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_of_pytorch_takes_the_same_steps_in_groups(kind: Any) -> None:
    models = [net(), net()]
    whole, grouped = (kind(model.parameters(), lr=0.01, foreach=True) for model in models)
    assert memrewrite.step_in_groups(grouped, LAYER) is grouped
    for model, optimizer in zip(models, (whole, grouped), strict=True):
        trained(optimizer, model)
    for pair in zip(*(model.parameters() for model in models), strict=True):
        assert same_bits(*pair)
    for pair in zip(tensors(whole), tensors(grouped), strict=True):
        assert same_bits(*pair)
    assert len(grouped.param_groups) == 1
    assert {**grouped.param_groups[0], "params": ()} == {**whole.param_groups[0], "params": ()}
    assert isinstance(grouped, kind)
    for again in (copy.deepcopy(grouped), pickle.loads(pickle.dumps(grouped))):
        assert isinstance(again, InGroups)
        assert isinstance(again, kind)
        assert again.state_dict().keys() == whole.state_dict().keys()


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, and updates one parameter after another."""

    taken: ClassVar[list[int]] = []

    def __init__(self, parameters: Iterable[nn.Parameter], of_all: bool = False) -> None:
        super().__init__(parameters, {"lr": 1.0, "steps": 0, "of_all": of_all})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.taken.append(len(group["params"]))
            group["steps"] += 1
            norms = [p.grad.norm() for p in group["params"]]
            for parameter, norm in zip(group["params"], norms, strict=True):
                parameter.sub_(parameter.grad / (sum(norms) if group["of_all"] else norm))


def test_groups_have_so_many_bytes_and_hooks_see_one_step() -> None:
    model, seen = net(), list[str]()
    optimizer = memrewrite.step_in_groups(Counting(model.parameters()), 2 * LAYER)
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    Counting.taken.clear()
    trained(optimizer, model)
    assert Counting.taken == [2] * 6 * 4  # a weight and a bias: another weight is a bias too many
    assert optimizer.param_groups[0]["steps"] == 4
    assert len(optimizer.param_groups) == 1
    assert seen == ["stepped"] * 4


def test_a_scheduler_that_was_there_before_sees_its_steps() -> None:
    model = net()
    optimizer = Counting(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    memrewrite.step_in_groups(optimizer, 2 * LAYER)
    Counting.taken.clear()
    trained(optimizer, model)  # under another one, made after
    scheduler.step()  # which would warn of a step that it has not seen
    assert Counting.taken == [2] * 6 * 4
    assert len(optimizer.param_groups) == 1


def test_a_step_that_fails_leaves_the_groups_whole() -> None:
    model = net()
    optimizer = memrewrite.step_in_groups(Counting(model.parameters()), LAYER)
    with pytest.raises(AttributeError):  # of gradients that are not there
        optimizer.step()
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (functools.partial(Counting, of_all=True), "Counting computes other numbers in groups: what it does to one"),
        (torch.optim.LBFGS, "LBFGS takes no step in groups"),
    ],
)
def test_where_the_step_would_be_another_it_is_refused(optimizer: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        memrewrite.step_in_groups(optimizer(net().parameters()))
    with pytest.raises(UsageError, match=why):
        memrewrite.optimize(net(), torch.ones(3, WIDTH), optimizer=optimizer, optimizer_step="grouped", verify=False)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_what_the_step_makes_beside_its_parameters_is_of_one_group(kind: Any) -> None:
    model, inputs = net(8, 256), torch.ones(3, 256)
    each = 4 * 256 * 256
    peaks = [
        memrewrite.estimate(model, inputs, optimizer=made, device="cuda").peak
        for made in (kind, making_groups(kind, 2 * each))
    ]
    assert [peak.phase for peak in peaks] == ["step", "step"]
    beside = [peak.categories["temporaries"] for peak in peaks]
    assert beside[0] >= 8 * each
    assert beside[1] <= 2 * each
    assert peaks[0].bytes - peaks[1].bytes == beside[0] - beside[1]


def test_optimize_plans_for_groups_and_lets_the_optimizer_that_it_is_given_step_so() -> None:
    model, inputs = net(), torch.ones(3, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    given = memrewrite.optimize(model, inputs, optimizer=optimizer, optimizer_step="grouped", verify=False)
    assert isinstance(optimizer, InGroups)
    assert not any("step_in_groups" in note for note in given.report.notes)
    named = memrewrite.optimize(model, inputs, optimizer="adamw", optimizer_step="grouped", verify=False)
    assert any("memrewrite.step_in_groups(optimizer)" in note for note in named.report.notes)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"optimizer_step": "twice"}, "optimizer_step='twice' is unknown; give 'whole', 'grouped' or"),
        ({"optimizer_step": "grouped", "optimizer": None}, "'grouped' is for a training step with an optimizer"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        memrewrite.optimize(net(), torch.ones(3, WIDTH), **asked)


def test_plans_are_kept_by_whether_the_step_is_in_groups() -> None:
    model = net()
    whole, grouped = (torch.optim.AdamW(model.parameters(), lr=rate) for rate in (0.1, 0.2))
    memrewrite.step_in_groups(grouped)
    described = _optimizer(factory_like(grouped))
    assert described == ("in groups", MOST, _optimizer(factory_like(whole)))
    assert isinstance(factory_like(grouped)(net().parameters()), InGroups)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.endswith("-grouped")])
def test_the_command_line_has_names_for_them(name: str) -> None:
    factory, most = made_whole(optimizer_factory(name))
    assert factory is optimizer_factory(name.removesuffix("-grouped"))
    assert most == MOST
