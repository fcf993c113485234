"""Hand-written GELU, hard-swish and Mish in many spellings become native; near misses and traps stay."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from memrewrite.passes.composites import Composites
from tests.passes.helpers import (
    FRONT_ENDS,
    WIDTH,
    Around,
    assert_as_good,
    assert_same_bits,
    example,
    functional,
    numbers,
    saved_storages,
    targets,
    ulps,
)

Function = Callable[[Any, Tensor], Any]
K = math.sqrt(2 / math.pi)

SPELLINGS: dict[str, dict[str, Function]] = {
    "tanh GELU": {
        "x ** 3": lambda m, x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**3))),
        "torch.pow": lambda m, x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * torch.pow(x, 3.0)))),
        "x * x * x": lambda m, x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
        "x factored out": lambda m, x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        "squared": lambda m, x: x * 0.5 * (1 + torch.tanh(K * x * (1 + 0.044715 * x.pow(2)))),
        "gate first": lambda m, x: (torch.tanh((x**3 * 0.044715 + x) * K) + 1) * x * 0.5,
        "half last": lambda m, x: x * (1 + torch.tanh(K * (x + 0.044715 * x**3))) / 2,
        "distribution function": lambda m, x: x * (0.5 * (1 + torch.tanh(K * (x + 0.044715 * x**3)))),
        "half inside": lambda m, x: x * (0.5 + 0.5 * torch.tanh(K * (x + 0.044715 * x**3))),
        "in place": lambda m, x: (K * (x + 0.044715 * x**3)).tanh().add(1).mul_(x).mul_(0.5),
        "of a multiple": lambda m, x: _of_a_multiple(x * 3),
    },
    "erf GELU": {
        "divided": lambda m, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        "multiplied": lambda m, x: 0.5 * x * (torch.erf(x * math.sqrt(0.5)) + 1),
        "distribution function": lambda m, x: (1 + torch.special.erf(x * 0.7071067811865475)) * 0.5 * x,
        "methods": lambda m, x: x.mul((x / 1.4142135623730951).erf().add(1)).div(2),
    },
    "hard-swish": {
        "relu6": lambda m, x: x * F.relu6(x + 3) / 6,
        "relu6 first": lambda m, x: F.relu6(3 + x) / 6 * x,
        "a sixth": lambda m, x: x * (F.relu6(x + 3) * (1 / 6)),
        "relu6 in place": lambda m, x: x * F.relu6(x + 3, inplace=True) / 6,
        "clamp": lambda m, x: x * torch.clamp(x + 3, min=0, max=6) / 6,
        "hardtanh": lambda m, x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6,
        "hardsigmoid": lambda m, x: x * F.hardsigmoid(x),
        "hardsigmoid first": lambda m, x: F.hardsigmoid(x, inplace=False).mul(x),
    },
    "Mish": {
        "softplus": lambda m, x: x * torch.tanh(F.softplus(x)),
        "gate first": lambda m, x: F.softplus(x, 1.0, 20.0).tanh() * x,
    },
}
NATIVE = {"tanh GELU": "gelu", "erf GELU": "gelu", "hard-swish": "hardswish", "Mish": "mish"}
CASES = [(kind, spelling, end) for kind in SPELLINGS for spelling in SPELLINGS[kind] for end in FRONT_ENDS]


def around(kind: str, function: Function) -> tuple[Around, Tensor]:
    """A model and its input; in float64 for the erf GELU, whose native kernel for float32 on a CPU is refused."""
    dtype = torch.float64 if kind == "erf GELU" else torch.float32
    return Around(function).to(dtype), example().to(dtype)


def _of_a_multiple(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("kind", "spelling", "front_end"), CASES)
def test_every_spelling_becomes_native(kind: str, spelling: str, front_end: str) -> None:
    model, x = around(kind, SPELLINGS[kind][spelling])
    graph_module, result = functional(model, x, Composites(), front_end)
    assert [a.what for a in result.applied] == [f"written-out {kind} becomes the native operation"]
    assert not result.refused
    assert targets(graph_module)[-1] == f"{NATIVE[kind]}.default"
    full = x.shape[0] * WIDTH
    assert [size for size in saved_storages(graph_module, x, model) if size == full] == [full]
    assert_as_good(graph_module, model, x)


@pytest.mark.parametrize("kind", SPELLINGS)
def test_the_gate_and_all_it_read_leave_the_graph(kind: str) -> None:
    model, x = around(kind, next(iter(SPELLINGS[kind].values())))
    graph_module, _ = functional(model, x, Composites(), "export")
    assert targets(graph_module) == ["linear.default", f"{NATIVE[kind]}.default"]


def _doubled(m: Any, x: Tensor) -> Tensor:
    y = x * F.relu6(x + 3) / 6
    return y * torch.tanh(F.softplus(y))


def test_composites_of_composites_are_all_rewritten() -> None:
    model, x = Around(_doubled), example()
    graph_module, result = functional(model, x, Composites(), "export")
    assert len(result.applied) == 2
    assert targets(graph_module) == ["linear.default", "hardswish.default", "mish.default"]
    assert_as_good(graph_module, model, x)


EDGES = torch.tensor([math.nan, math.inf, -math.inf, -1000.0, 1000.0, 89.0, -89.0, -0.0, 1e-40, 3.0, -3.0])


@pytest.mark.parametrize("kind", SPELLINGS)
def test_edge_values_agree(kind: str) -> None:
    written, native = next(iter(SPELLINGS[kind].values())), getattr(F, NATIVE[kind])
    kwargs = {"approximate": "tanh"} if kind == "tanh GELU" else {}
    edges = EDGES.double() if kind == "erf GELU" else EDGES
    ours, theirs = native(edges, **kwargs), written(None, edges)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-44, equal_nan=True)


@pytest.mark.parametrize("kind", ["hard-swish", "Mish"])
def test_simple_forms_are_within_some_ulps(kind: str) -> None:
    x = 4 * torch.randn(4096, generator=torch.Generator().manual_seed(3))
    assert ulps(getattr(F, NATIVE[kind])(x), next(iter(SPELLINGS[kind].values()))(None, x)) <= 4


def _cube_used(m: Any, x: Tensor) -> Tensor:
    cube = x**3
    return 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * cube))) + cube


def _clipped_returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    clipped = F.relu6(x + 3)
    return x * clipped / 6, clipped


def _written_view(m: Any, x: Tensor) -> Tensor:
    view = x[:, :2]
    clipped = F.relu6(x + 3)
    view.add_(1)
    return x * clipped / 6


def _without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.tanh(F.softplus(x))
    return x * gate


def _whole_hard_swish(m: Any, x: Tensor) -> Tensor:
    whole = x.int()
    return x + whole * F.relu6(whole + 3) / 6


TRAPS: dict[str, tuple[Function, str, tuple[str, ...]]] = {
    "cube used elsewhere": (_cube_used, "is used elsewhere (by add", FRONT_ENDS),
    "gate returned": (_clipped_returned, "is used elsewhere (by output)", FRONT_ENDS),
    "x written in between": (_written_view, "writes a tensor of the pattern before", FRONT_ENDS),
    "integers promote": (_whole_hard_swish, "is torch.int32, which the written-out form promotes", FRONT_ENDS),
    "poor erf on a CPU": (SPELLINGS["erf GELU"]["divided"], "less accurate than erf written out", FRONT_ENDS),
    "gate under no_grad": (_without_gradient, "do not take part in the gradient alike", ("dynamo",)),
}


@pytest.mark.parametrize(("trap", "front_end"), [(trap, end) for trap in TRAPS for end in TRAPS[trap][2]])
def test_traps_are_refused_with_a_sentence(trap: str, front_end: str) -> None:
    function, sentence, _ = TRAPS[trap]
    model, x = Around(function), example()
    graph_module, result = functional(model, x, Composites(), front_end)
    assert not result.applied
    assert [sentence in refused.reason for refused in result.refused] == [True], result.refused
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


NEAR_MISSES: dict[str, Function] = {
    "other slope": lambda m, x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    "other cube": lambda m, x: 0.5 * x * (1 + torch.tanh(K * (x + 0.0447 * x**3))),
    "no half": lambda m, x: x * (1 + torch.erf(x / math.sqrt(2))),
    "minus": lambda m, x: 0.5 * x * (1 - torch.erf(x / math.sqrt(2))),
    "of two tensors": lambda m, x: 0.5 * x.cos() * (1 + torch.erf(x / math.sqrt(2))),
    "shifted by two": lambda m, x: x * F.relu6(x + 2) / 6,
    "a fifth": lambda m, x: x * F.relu6(x + 3) / 5,
    "clamped to five": lambda m, x: x * torch.clamp(x + 3, 0, 5) / 6,
    "half clamped": lambda m, x: x * torch.clamp(x + 3, min=0) / 6,
    "softplus beta": lambda m, x: x * torch.tanh(F.softplus(x, beta=2)),
    "softplus of another": lambda m, x: x * torch.tanh(F.softplus(x + 1)),
    "divided by a tensor": lambda m, x: x * F.relu6(x + 3) / m.scale,
    "native": lambda m, x: F.gelu(x) + F.hardswish(x) + F.mish(x),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name: str, front_end: str) -> None:
    model, x = Around(NEAR_MISSES[name]), example()
    graph_module, result = functional(model, x, Composites(), front_end)
    assert not result.applied
    assert not result.refused
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))
