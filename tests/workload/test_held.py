"""The tensors a function holds, wherever they are, and that a step counts them as its targets."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.simulate import run_tracked, simulate
from memrewrite.workload.held import held_by
from memrewrite.workload.step import Inputs, Step

Y = torch.zeros(1000)
WEIGHTED = nn.CrossEntropyLoss(weight=torch.ones(1000))


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def of_global(output: Tensor) -> Tensor:
    return squared(output, Y)


def through_another(output: Tensor) -> Tensor:
    return of_global(output)


def of_module(output: Tensor) -> Tensor:
    return WEIGHTED(output.unsqueeze(0), torch.tensor([1]))


@dataclass
class Criterion:
    batch: dict[str, Tensor] = field(default_factory=lambda: {"y": Y})

    def __call__(self, output: Tensor) -> Tensor:
        return squared(output, self.batch["y"])

    def method(self, output: Tensor) -> Tensor:
        return self(output)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.y = Y
        self.register_buffer("weight", torch.ones(3))

    def forward(self, output: Tensor) -> Tensor:
        return squared(output, self.y)


def closure() -> Callable[[Tensor], Tensor]:
    y, unset = Y, None
    del unset
    return lambda output: squared(output, y)


def nested() -> Callable[[Tensor], Tensor]:
    y = Y

    def outer(output: Tensor) -> Tensor:
        def inner() -> Tensor:
            return squared(output, y)

        return inner()

    return outer


HOLDERS: dict[str, Callable[..., Any]] = {
    "closure": closure(),
    "function in a closure": nested(),
    "partial": functools.partial(squared, y=Y),
    "partial of an argument in a list": functools.partial(lambda ys, output: squared(output, ys[0]), [Y]),
    "default": lambda output, y=Y: squared(output, y),
    "default by keyword": lambda output, *, y=Y: squared(output, y),
    "global": of_global,
    "global of a function of the same file": through_another,
    "callable object": Criterion(),
    "method": Criterion().method,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_function_holds_is_found_once(name: str) -> None:
    assert [id(tensor) for tensor in held_by(HOLDERS[name])[0]] == [id(Y)]
    assert held_by(HOLDERS[name])[1] == []


def test_what_modules_hold_is_told_apart() -> None:
    own, of_modules = held_by(of_module)
    assert own == []
    assert [id(tensor) for tensor in of_modules] == [id(WEIGHTED.weight)]
    module = Module()
    own, of_modules = held_by(functools.partial(lambda criterion, output: criterion(output), module))
    assert own == []
    assert {id(tensor) for tensor in of_modules} == {id(Y), id(module.weight)}


def test_nothing_is_found_in_what_holds_nothing() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    for function in (nn.functional.mse_loss, len, lambda output: output.sum(), lambda output: (optimizer, output)):
        assert held_by(function) == ([], [])


@pytest.mark.parametrize("name", HOLDERS)
def test_a_step_counts_targets_as_inputs(name: str) -> None:
    module, inputs = nn.Linear(1000, 1000), Inputs((torch.ones(1000),), {})
    held, plain = (simulate(module, inputs, Step(loss_fn=fn)) for fn in (HOLDERS[name], lambda output: output.mean()))
    real = run_tracked(module, inputs, Step(loss_fn=HOLDERS[name]))
    assert (real.peak, real.phases, real.categories) == (held.peak, held.phases, held.categories)
    assert held.categories["inputs"] == plain.categories["inputs"] + 4096


def test_what_is_the_models_or_an_input_is_counted_once() -> None:
    module, x = nn.Linear(1000, 1000), torch.ones(1000)

    def loss(output: Tensor) -> Tensor:
        return (output - x).square().mean() + module.weight.square().mean()

    timeline = simulate(module, Inputs((x,), {}), Step(loss_fn=loss))
    assert timeline.categories["inputs"] == 4096
    assert timeline.categories["parameters"] == 4_000_256 + 4096
    assert module.weight.grad is None


def test_what_is_measured_has_the_targets_too() -> None:
    module, x = nn.Linear(1000, 1000), torch.ones(1000)
    with_target = memrewrite.measure(module, x, loss_fn=of_global, optimizer="sgd")
    assert with_target.peak == memrewrite.estimate(module, x, loss_fn=of_global, optimizer="sgd").peak.bytes
    assert with_target.phases[0][1] == memrewrite.measure(module, x, optimizer="sgd").phases[0][1] + 4096


EDGES = torch.eye(64).to_sparse()
TEACHER = nn.Sequential(nn.Linear(32, 512), nn.BatchNorm1d(512)).requires_grad_(False)
BESIDE = nn.Linear(32, 512)
body = torch.ones(1 << 20)  # what forward names is an attribute of the model


class Student(nn.Module):
    """Has a frozen teacher, which its own file has and it does not, asked by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def taught(self, x: Tensor) -> Tensor:
        found: Tensor = TEACHER(x)[:, :32]
        return found

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(self.taught(x))
        return result


class Helped(Student):
    """Trains a layer of its own file besides."""

    def taught(self, x: Tensor) -> Tensor:
        found: Tensor = BESIDE(x)[:, :32]
        return found


def test_what_forward_holds_by_a_global_is_counted_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, x, before = Student(), torch.randn(64, 32), {k: v.clone() for k, v in TEACHER.state_dict().items()}
    foreseen = memrewrite.estimate(model, x).peak
    assert memrewrite.measure(model, x).peak == foreseen.bytes
    assert foreseen.categories["buffers"] >= 4 * 512 * 32
    result = memrewrite.optimize(model, x, budget="min")
    assert result.report.predicted_before is not None
    assert result.report.predicted_after is not None
    assert result.report.predicted_before.peak == foreseen.bytes
    assert memrewrite.measure(result, x).peak == result.report.predicted_after.peak
    assert memrewrite.verify(model, result, x).equivalent
    assert all(value.equal(before[name]) for name, value in TEACHER.state_dict().items())


def test_a_layer_beside_the_model_keeps_no_gradient_of_ours() -> None:
    model, x = Helped(), torch.randn(64, 32)
    before = BESIDE.weight.detach().clone()
    memrewrite.measure(model, x)
    memrewrite.verify(model, model, x)
    assert BESIDE.weight.grad is None
    assert BESIDE.weight.equal(before)
    BESIDE.weight.grad = kept = torch.ones(512, 32)
    memrewrite.measure(model, x)
    assert BESIDE.weight.grad is kept
    BESIDE.weight.grad = None


class Linked(Student):
    """Takes steps along edges, a sparse tensor of its own file; no other batch goes with them."""

    def taught(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(EDGES, x)


def test_a_sparse_tensor_beside_the_model_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = Linked(), torch.randn(64, 32)
    foreseen = memrewrite.estimate(model, x).peak.bytes
    assert capfd.readouterr().err == ""
    assert memrewrite.measure(model, x).peak == foreseen
    result = memrewrite.optimize(model, x, budget="min")
    assert memrewrite.verify(model, result, x).equivalent
