"""A forward that asks whether tensors need gradients: the program is right for the answers at capture only."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.runtime.promise import FallbackWarning

WIDTH = 16
SAID = "it asks whether tensors need gradients"


class Net(nn.Module):
    """Does something to its input, then has layers."""

    def __init__(self, first: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.SiLU()) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.first(self, x)))
        return result


def asks_the_input(self: Net, x: Tensor) -> Tensor:
    if x.requires_grad:
        x = x * 1.0
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def asks_a_parameter(self: Net, x: Tensor) -> Tensor:
    return x * 2 if self.head.weight.requires_grad else x


def asks_whether_they_are_on(self: Net, x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x


def does_the_same_either_way(self: Net, x: Tensor) -> Tensor:
    asked = x.requires_grad or x.is_leaf or torch.is_grad_enabled()
    return x if isinstance(asked, bool) else x * 2


def made(first: Callable[[Net, Tensor], Tensor]) -> tuple[Net, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Net(first), torch.randn(8, WIDTH)
    plain = copy.deepcopy(model)
    return plain, memrewrite.optimize(model, x, budget="min"), x


def numbers(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    result = model(x)
    if result.requires_grad:
        result.square().sum().backward()
    owners = [*model.parameters(), x]
    return [result.detach(), *(t.grad.clone() for t in owners if t.grad is not None)]


def assert_alike(one: nn.Module, other: nn.Module, x: Tensor) -> None:
    for tensors in zip(numbers(one, x.detach()), numbers(other, x.detach()), strict=True):
        assert torch.equal(*tensors)
    mine, theirs = (x.detach().clone().requires_grad_() for _ in range(2))
    for tensors in zip(numbers(one, mine), numbers(other, theirs), strict=True):
        assert torch.equal(*tensors)


@pytest.mark.parametrize("first", [asks_the_input, asks_a_parameter, asks_whether_they_are_on])
def test_it_is_planned_for_the_answers_at_capture(first: Callable[[Net, Tensor], Tensor]) -> None:
    plain, planned, x = made(first)
    report = memrewrite.report_of(planned)
    assert report.changed
    assert "bit-equal" in report.verdict
    for tensors in zip(numbers(plain, x), numbers(planned, x), strict=True):  # without a warning
        assert torch.equal(*tensors)


@pytest.mark.parametrize("first", [asks_a_parameter, asks_whether_they_are_on])
def test_under_autocast_it_is_planned_without_a_warning(first: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    planned = memrewrite.optimize(Net(first), torch.randn(8, WIDTH), budget="min", amp=torch.bfloat16)
    report = memrewrite.report_of(planned)
    assert report.changed
    assert "bit-equal" in report.verdict


def test_an_input_that_needs_a_gradient_runs_the_original() -> None:
    plain, planned, x = made(asks_the_input)
    with pytest.warns(FallbackWarning, match=SAID):
        assert_alike(plain, planned, x)


def test_a_frozen_parameter_runs_the_original() -> None:
    plain, planned, x = made(asks_a_parameter)
    for model in (plain, planned):
        model.get_parameter("head.weight").requires_grad_(False)
    with pytest.warns(FallbackWarning, match=SAID):
        assert_alike(plain, planned, x)


def test_without_gradients_it_runs_the_original() -> None:
    plain, planned, x = made(asks_whether_they_are_on)
    with torch.no_grad(), pytest.warns(FallbackWarning, match=SAID):
        assert torch.equal(plain(x), planned(x))
    assert_alike(plain, planned, x)


def test_a_question_that_changes_nothing_is_no_matter() -> None:
    plain, planned, x = made(does_the_same_either_way)
    assert_alike(plain, planned, x)
    with torch.no_grad():
        assert torch.equal(plain(x), planned(x))


@pytest.mark.parametrize("first", [asks_a_parameter, asks_whether_they_are_on])
def test_in_eval_mode_it_is_planned_for_calls_without_gradients(first: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Net(first).eval(), torch.randn(8, WIDTH)
    planned = memrewrite.optimize(copy.deepcopy(model), x, budget="min")
    assert memrewrite.report_of(planned).changed
    with torch.no_grad():
        assert torch.equal(model(x), planned(x))  # without a warning
    for each in (model, planned):
        each.requires_grad_(False)
    with pytest.warns(FallbackWarning, match=SAID):
        assert torch.equal(model(x), planned(x))


def test_it_survives_copies() -> None:
    plain, planned, x = made(asks_the_input)
    with pytest.warns(FallbackWarning, match=SAID):
        assert_alike(plain, copy.deepcopy(planned), x)
