"""Tensors that forward leaves in attributes: a graph computes them, and a program leaves them there, too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memrewrite
from memrewrite.capture import FRONT_ENDS, capture
from memrewrite.equivalence.verifying import verify
from memrewrite.records.errors import CaptureError
from memrewrite.simulate import run_tracked, simulate
from memrewrite.workload.step import Inputs, Step

WIDTH, LENGTH = 32, 64


class Attention(nn.Module):
    """Leaves something of its scores, by ``leave``."""

    def __init__(self, leave: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.parts, self.last, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), leave

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        self.leave(self, scores)
        result: Tensor = x + self.last(scores @ value)
        return result


class Net(nn.Module):
    layers: Any
    given: Any
    first: Any
    total: Any

    def __init__(self, leave: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(leave) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def left(self) -> list[Any]:
        return [leaf for layer in self.layers for leaf in tree_leaves(getattr(layer, "left", None))]


class Summed(Net):
    """Reads what the layers have left before it ends."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.total = torch.stack([layer.left for layer in self.layers]).sum()
        return x


class Given(Net):
    """Leaves what it is given, too, and a view of that."""

    def forward(self, x: Tensor) -> Tensor:
        self.given, self.first = x, x[:, 0]
        return super().forward(x)


def detached(self: Any, scores: Tensor) -> None:
    self.left = scores.detach()


def whole(self: Any, scores: Tensor) -> None:
    self.left = scores


def mean(self: Any, scores: Tensor) -> None:
    self.left = scores.square().mean()


def nested(self: Any, scores: Tensor) -> None:
    self.left = {"mean": scores.mean(), "ends": [scores[:, :1], scores[:, -1:].detach()]}


def weight(self: Any, scores: Tensor) -> None:
    self.left = self.parts.weight


def averaged(self: Any, scores: Tensor) -> None:
    self.left = scores.mean() if getattr(self, "left", None) is None else (self.left + scores.mean()).detach()


def example(rows: int = 8) -> Tensor:
    return torch.randn(rows, LENGTH, WIDTH)


def assert_alike(plain: Any, planned: Any, x: Tensor) -> None:
    """One step whose loss has what was left in it."""
    for model in (plain, planned):
        model.zero_grad()
        (model(x).square().mean() + sum(each.sum() for each in model.left())).backward()
    for mine, theirs in zip(planned.left(), plain.left(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
    for mine, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("leave", [detached, whole, mean, nested])
@pytest.mark.parametrize(
    "way", [lambda model: model, copy.deepcopy, lambda model: torch.compile(model, backend="eager")]
)
def test_they_are_those_of_each_call(leave: Callable[[Any, Tensor], None], way: Callable[[Any], Any]) -> None:
    plain = Net(leave)
    planned = way(memrewrite.optimize(copy.deepcopy(plain), example(), budget="min", exact=True))
    for rows in (8, 8, 3):
        assert_alike(plain, planned, example(rows))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_model_is_one_graph(front_end: str) -> None:
    found = capture(Net(mean), Inputs((example(),), {}), front_end=front_end)
    assert found.held == tuple((f"layers.{i}", "left") for i in range(4))
    assert found.results == 1


def test_what_is_left_may_be_given() -> None:
    plain = Given(detached)
    planned: Any = memrewrite.optimize(copy.deepcopy(plain), example(), budget="min", exact=True)
    x = example()
    assert_alike(plain, planned, x)
    assert planned.given is x
    assert torch.equal(planned.first, x[:, 0])


def test_what_reads_them_later_in_the_same_call_reads_those() -> None:
    plain = Summed(mean)
    planned: Any = memrewrite.optimize(copy.deepcopy(plain), example(), budget="min", exact=True)
    for _ in range(2):
        assert_alike(plain, planned, example())
        assert torch.equal(plain.total, planned.total)


@pytest.mark.parametrize("leave", [averaged, weight])
def test_what_carries_something_from_call_to_call_is_refused(leave: Callable[[Any, Tensor], None]) -> None:
    with pytest.raises(CaptureError, match=r"assigns a new tensor to self\.layers\.0\..*left in forward"):
        capture(Net(leave), Inputs((example(),), {}))


@pytest.mark.parametrize("leave", [detached, whole, mean])
def test_steps_take_what_is_foreseen(leave: Callable[[Any, Tensor], None]) -> None:
    model, inputs = Net(leave), Inputs((example(),), {})
    planned = memrewrite.optimize(model, inputs.args, budget="min", optimizer="sgd")
    told = memrewrite.report_of(planned).predicted_after
    step = Step(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert simulate(planned, inputs, step).peak == run_tracked(planned, inputs, step).peak == told.peak
    assert told.peak < 0.7 * memrewrite.report_of(planned).predicted_before.peak


def test_the_proof_compares_them() -> None:
    model, inputs = Net(mean), Inputs((example(),), {})
    planned = memrewrite.optimize(copy.deepcopy(model), inputs.args, budget="min", exact=True)
    assert verify(model, planned, inputs, Step(), exact=True).equivalent
    for layer in model.layers:
        layer.leave = lambda self, scores: mean(self, 2 * scores)
    told = verify(model, planned, inputs, Step(), exact=True)
    assert not told.equivalent
    assert "layers.0.left" in told.summary


def test_a_program_that_returns_its_loss_alone_leaves_them() -> None:
    class Scored(Net):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return {"loss": x.square().mean(), "x": x}

    plain: Any = Scored(mean)
    planned: Any = memrewrite.optimize(copy.deepcopy(plain), example(), budget="min", exact=True, returns="loss")
    x = example()
    assert torch.equal(plain(x)["loss"], planned(x)["loss"])
    assert planned(x)["x"] is None
    assert all(map(torch.equal, plain.left(), planned.left()))


def test_numbers_vary_beside_them() -> None:
    class Scaled(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    plain: Any = Scaled(mean)
    planned: Any = memrewrite.optimize(copy.deepcopy(plain), (example(), 0.5), budget="min", exact=True)
    for scale in (0.5, 0.7):
        x = example()
        assert torch.equal(plain(x, scale), planned(x, scale))
        assert all(map(torch.equal, plain.left(), planned.left()))
