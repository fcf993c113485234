"""Every spelling of Swish is rewritten with the right numbers; every trap is refused with a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from memrewrite.capture.origin import origin
from memrewrite.passes.swish import Swish
from tests.passes.helpers import (
    FRONT_ENDS,
    WIDTH,
    Around,
    assert_as_good,
    assert_same_bits,
    example,
    functional,
    numbers,
    rewrite,
    saved_storages,
    targets,
    ulps,
)

Function = Callable[[Any, Tensor], Any]

SILU: dict[str, Function] = {
    "torch": lambda m, x: x * torch.sigmoid(x),
    "gate first": lambda m, x: torch.sigmoid(x) * x,
    "method": lambda m, x: x * x.sigmoid(),
    "functional": lambda m, x: x * F.sigmoid(x),
    "module": lambda m, x: x * m.sigmoid(x),
    "mul": lambda m, x: torch.mul(x, torch.sigmoid(x)),
    "mul with names": lambda m, x: torch.mul(input=x, other=torch.sigmoid(input=x)),
    "multiply": lambda m, x: torch.multiply(x.sigmoid(), x),
    "method mul": lambda m, x: x.mul(x.sigmoid()),
    "expit": lambda m, x: x * torch.special.expit(x),
    "in place on the gate": lambda m, x: x.sigmoid().mul_(x),
    "in place on x": lambda m, x: x.mul_(x.sigmoid()),
    "augmented assignment": lambda m, x: _augmented(x),
    "gate augmented": lambda m, x: _augmented_gate(x),
}
SCALED: dict[str, Function] = {
    "constant": lambda m, x: x * torch.sigmoid(1.702 * x),
    "constant after": lambda m, x: torch.sigmoid(x * 1.702) * x,
    "integer": lambda m, x: x * torch.sigmoid(2 * x),
    "negated": lambda m, x: x * torch.sigmoid(-x),
    "negated function": lambda m, x: torch.neg(x).sigmoid() * x,
    "gate in place": lambda m, x: x * (x * 1.5).sigmoid_(),
    "buffer": lambda m, x: x * torch.sigmoid(m.scale * x),
    "learnable": lambda m, x: x * torch.sigmoid(m.beta * x),
    "learnable after": lambda m, x: torch.sigmoid(x * m.beta) * x,
    "learnable per channel": lambda m, x: x * torch.sigmoid(m.betas * x),
    "computed from a parameter": lambda m, x: x * torch.sigmoid(F.softplus(m.beta) * x),
    "tensor constant": lambda m, x: x * torch.sigmoid(torch.tensor(1.7) * x),
}


def _augmented(x: Tensor) -> Tensor:
    x *= torch.sigmoid(x)
    return x


def _augmented_gate(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    gate *= x
    return gate


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spelling", SILU)
def test_every_spelling_with_beta_one_becomes_silu(spelling: str, front_end: str) -> None:
    model, x = Around(SILU[spelling]), example()
    graph_module, result = functional(model, x, Swish(), front_end)
    assert [a.what for a in result.applied] == ["x * sigmoid(x) saves x alone"]
    assert not result.refused
    assert targets(graph_module)[-1] == "silu.default"
    assert len(targets(graph_module)) == 2
    assert saved_storages(graph_module, x, model) == [x.shape[0] * WIDTH]
    plain = Around(SILU["torch"])  # written over its gate the original has no backward; its meaning does
    assert ulps(numbers(graph_module, x, model)["output 0"], numbers(plain, x, plain)["output 0"]) <= 1
    assert_as_good(graph_module, plain, x, owner=model)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spelling", SCALED)
def test_every_spelling_with_a_beta_becomes_swish(spelling: str, front_end: str) -> None:
    model, x = Around(SCALED[spelling]), example()
    graph_module, result = functional(model, x, Swish(), front_end)
    assert [a.what for a in result.applied] == ["x * sigmoid(beta * x) saves x alone"]
    assert targets(graph_module)[-1] == "swish"
    assert not {"mul", "mul.Tensor", "sigmoid", "sigmoid.default"} & set(targets(graph_module))
    full = x.shape[0] * WIDTH
    assert [size for size in saved_storages(graph_module, x, model) if size == full] == [full]
    assert torch.equal(numbers(graph_module, x, model)["output 0"], numbers(model, x, model)["output 0"])
    assert_as_good(graph_module, model, x)


@pytest.mark.parametrize("function", [SILU["torch"], SCALED["constant"], SCALED["learnable"]], ids=["1", "1.7", "beta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_exact_forward_keeps_every_bit(function: Function, dtype: torch.dtype) -> None:
    model, x = Around(function).to(dtype), example().to(dtype)
    graph_module, result = functional(model, x, Swish(exact_forward=True), "export")
    assert result.modified
    assert torch.equal(numbers(graph_module, x, model)["output 0"], numbers(model, x, model)["output 0"])
    assert saved_storages(graph_module, x, model)[-1] == x.numel()
    assert_as_good(graph_module, model, x, factor=3.0)


def test_nested_swishes_and_a_shared_scale_are_all_rewritten() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = x * torch.sigmoid(x)
        z = y * torch.sigmoid(1.5 * y)
        return z * torch.sigmoid(m.beta * z) + y

    model, x = Around(function), example()
    graph_module, result = functional(model, x, Swish(), "export")
    assert len(result.applied) == 3
    assert targets(graph_module) == ["linear.default", "silu.default", "swish", "swish", "add.Tensor"]
    assert_as_good(graph_module, model, x)


def _written_view(m: Any, x: Tensor) -> Tensor:
    view = x[:, :2]
    gate = torch.sigmoid(x)
    view.add_(1)
    return x * gate


def _gate_without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


def _gate_twice(m: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return x * gate + gate


def _gate_returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(x)
    return x * gate, gate


def _whole_numbers(m: Any, x: Tensor) -> Tensor:
    whole = x.int()
    return x + whole * torch.sigmoid(whole)


def _truths(m: Any, x: Tensor) -> Tensor:
    truth = x > 0
    return x + truth * torch.sigmoid(truth)


TRAPS: dict[str, tuple[Function, str, tuple[str, ...]]] = {
    "gate used elsewhere": (_gate_twice, "is used elsewhere (by add", FRONT_ENDS),
    "gate returned": (_gate_returned, "is used elsewhere (by output)", FRONT_ENDS),
    "integers promote": (_whole_numbers, "which the written-out form promotes", FRONT_ENDS),
    "booleans promote": (_truths, "is torch.bool, which the written-out form promotes", FRONT_ENDS),
    "wider beta promotes": (
        lambda m, x: x * torch.sigmoid(m.betas.double() * x),
        "gives torch.float64 (5, 6)",
        FRONT_ENDS,
    ),
    "beta broadcasts x": (lambda m, x: x * torch.sigmoid(m.betas[:, None, None] * x), "(6, 5, 6)", FRONT_ENDS),
    "x written in between": (_written_view, "writes a tensor of the pattern before", FRONT_ENDS),
    "beta is an activation": (
        lambda m, x: x * torch.sigmoid(x * x.cos()),
        "is computed from the model's input",
        FRONT_ENDS,
    ),
    "gate under no_grad": (_gate_without_gradient, "do not take part in the gradient alike", ("dynamo",)),
}


@pytest.mark.parametrize(("trap", "front_end"), [(trap, end) for trap in TRAPS for end in TRAPS[trap][2]])
def test_traps_are_refused_with_a_sentence(trap: str, front_end: str) -> None:
    function, sentence, _ = TRAPS[trap]
    model, x = Around(function), example()
    graph_module, result = functional(model, x, Swish(), front_end)
    assert not result.applied
    assert [sentence in refused.reason for refused in result.refused] == [True], result.refused
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


NOT_SWISH: dict[str, Function] = {
    "another gate": lambda m, x: x * torch.sigmoid(x + 1),
    "squeeze and excitation": lambda m, x: x * torch.sigmoid(x.mean(1, keepdim=True)),
    "tanh": lambda m, x: x * torch.tanh(x),
    "two gates": lambda m, x: torch.sigmoid(x) * torch.sigmoid(x),
    "detached": lambda m, x: x * torch.sigmoid(x.detach()),
    "glu": lambda m, x: F.glu(x),
    "native": lambda m, x: F.silu(x),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", NOT_SWISH)
def test_what_is_no_swish_is_left_alone(name: str, front_end: str) -> None:
    model, x = Around(NOT_SWISH[name]), example()
    graph_module, result = functional(model, x, Swish(), front_end)
    assert not result.applied
    assert not result.refused
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


def test_a_write_between_is_seen_without_functionalization_too() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        x.add_(1)
        return x * gate

    model, x = Around(function), example()
    graph_module, result = rewrite(model, x, [Swish()], "dynamo")
    assert [r.reason for r in result.refused] == ["add_ writes a tensor of the pattern before mul reads it."]
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


def test_the_replacement_keeps_its_place_in_the_model() -> None:
    model, x = Around(SCALED["learnable"]), example()
    graph_module, _ = functional(model, x, Swish(), "export")
    (node,) = [n for n in graph_module.graph.nodes if getattr(n.target, "__name__", "") == "swish"]
    assert node.meta["val"].shape == x.shape
    assert origin(node).line
