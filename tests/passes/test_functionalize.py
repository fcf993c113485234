"""In-place operations on activations become out-of-place; state, inputs and living aliases stay written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memrewrite.capture import capture
from memrewrite.observe.effects import observe
from memrewrite.passes.functionalize import Functionalize
from memrewrite.workload.step import Inputs
from tests.passes.helpers import FRONT_ENDS, Around, assert_same_bits, example, numbers, rewrite, targets

Function = Callable[[Any, Tensor], Any]


def _statement(m: Any, x: Tensor) -> Tensor:
    x.mul_(3)
    x.add_(1)
    return x * 2


def _augmented(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    y += x
    y *= 3
    y -= 1
    y /= 2
    return y


def _both_names(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.relu_()
    return x + 1, y * 2


def _dead_view(m: Any, x: Tensor) -> Tensor:
    size = x.view(-1).mul(2).sum()
    return x.relu_() + size


def _view_of_the_result(m: Any, x: Tensor) -> Tensor:
    view = x.mul_(3).view(-1)
    return view.mul_(2).sum() + 1


REWRITTEN: dict[str, tuple[Function, int]] = {
    "relu_": (lambda m, x: x.relu_(), 1),
    "torch.relu_": (lambda m, x: torch.relu_(x), 1),
    "module": (lambda m, x: m.relu(x), 1),
    "one module twice": (lambda m, x: m.relu(m.relu(x) - 1), 2),
    "statement": (_statement, 2),
    "augmented assignment": (_augmented, 4),
    "both names of one tensor": (_both_names, 1),
    "view read before": (_dead_view, 1),
    "silu_": (lambda m, x: F.silu(x, inplace=True), 1),
    "leaky_relu_ with slope": (lambda m, x: F.leaky_relu(x, 0.2, True), 1),
    "tanh_": (lambda m, x: x.tanh_(), 1),
    "hardtanh_": (lambda m, x: F.hardtanh(x, 0.0, 6.0, True), 1),
    "dropout_": (lambda m, x: F.dropout(x, 0.5, True, True), 1),
    "add_ with alpha": (lambda m, x: x.add_(x, alpha=2), 1),
    "clamp_": (lambda m, x: x.clamp_(min=-1, max=1), 1),
    "masked_fill_": (lambda m, x: x.masked_fill_(x > 0, 1.0), 1),
    "pow_": (lambda m, x: x.abs().pow_(2.0), 1),
    "power of each": (lambda m, x: x.abs().pow_(x), 1),
    "chain": (lambda m, x: x.mul_(2).add_(1).relu_(), 3),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", REWRITTEN)
def test_writes_to_activations_go(name: str, front_end: str) -> None:
    function, count = REWRITTEN[name]
    model, x = Around(function), example()
    graph_module, result = rewrite(model, x, [Functionalize()], front_end)
    assert (len(result.applied), result.refused) == (count, ())
    assert not [t for t in targets(graph_module) if t.partition(".")[0].endswith("_") or t.startswith("i")]
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


def _view_read_later(m: Any, x: Tensor) -> Tensor:
    view = x.view(-1)
    x.relu_()
    return view * 2


def _write_through_a_view(m: Any, x: Tensor) -> Tensor:
    x[:, :2].mul_(3)
    return x + 1


def _stays_low(m: Any, x: Tensor) -> Tensor:
    return x.bfloat16().mul_(x)


def _filled(m: Any, x: Tensor) -> Tensor:
    return x + torch.empty_like(x).normal_()


def _copied(m: Any, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x) + 1


def _permuted(m: Any, x: Tensor) -> Tensor:
    return x.view(-1, 2, 3).transpose(1, 2).div_(1.7).transpose(1, 2).relu()


REFUSED: dict[str, tuple[Function, str]] = {
    "view read later": (_view_read_later, "Its storage is also seen through view, which"),
    "written through a view": (_write_through_a_view, "Its storage is also seen through"),
    "permuted view": (_permuted, "whose gradient would have another memory format"),
    "gradient from the result": (lambda m, x: F.elu(x, 0.5, True), "takes its gradient from its result"),
    "selu is elu": (lambda m, x: F.selu(x, inplace=True), "takes its gradient from its result"),
    "promotion": (_stays_low, "would have another dtype, shape or memory format"),
    "random filling": (_filled, "normal_"),
    "copy": (_copied, "copy_"),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_living_aliases_and_odd_writes_stay_with_a_sentence(name: str, front_end: str) -> None:
    function, sentence = REFUSED[name]
    model, x = Around(function), example()
    graph_module, result = rewrite(model, x, [Functionalize()], front_end)
    assert not result.applied
    assert [sentence in refused.reason for refused in result.refused] == [True], result.refused
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_view_of_the_new_value_is_followed(front_end: str) -> None:
    model, x = Around(_view_of_the_result), example()
    graph_module, result = rewrite(model, x, [Functionalize()], front_end)
    assert (len(result.applied), result.refused) == (2, ())
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


def test_the_callers_tensor_stays_written() -> None:
    model, x = WritesItsInput(), example()
    graph_module, result = rewrite(model, x, [Functionalize()], "export")
    assert [r.reason for r in result.refused] == ["mul_ writes the caller's own tensor, which has to stay written."]
    ours, theirs = x.clone(), x.clone()
    graph_module(ours)
    model(theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, 2 * x)


class CopiesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(torch.empty_like(x).copy_(x))
        return result


def test_a_copy_of_the_callers_tensor_stays_as_its_gradient_may_be_asked_for() -> None:
    model, x = CopiesItsInput(), torch.randn(4, 8)
    graph_module = capture(model, Inputs((x,), {})).graph_module
    result = Functionalize()(graph_module, observe(graph_module, [x]))
    assert [refused.reason for refused in result.refused] == ["Out of place, copy_ has no gradient."]
    x.requires_grad_()
    ours, theirs = (torch.autograd.grad(output.sum(), x)[0] for output in (graph_module(x)[0], model(x)))
    assert ours.equal(theirs)


class Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.norm(x).relu_() * self.count


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_writes_to_buffers_are_state(front_end: str) -> None:
    model, x = Counting(), example()
    graph_module, result = rewrite(model, x, [Functionalize()], front_end)
    assert (len(result.applied), result.refused) == (1, ())
    graph_module(x)
    graph_module(x)
    assert float(model.count) == 2
    assert model.state_dict()["norm.num_batches_tracked"] == 2


def test_dropout_elsewhere_than_on_a_cpu_keeps_its_kernel() -> None:
    model, x = Around(lambda m, x: F.dropout(x, 0.5, True, True)), example()
    graph_module = capture(model, Inputs((x,), {})).graph_module
    effects = observe(graph_module, [x])
    for node in graph_module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = torch.empty(x.shape, device="meta")
    result = Functionalize()(graph_module, effects)
    assert [r.reason for r in result.refused] == [
        "Out of place, dropout_ would draw its random numbers by another kernel."
    ]
