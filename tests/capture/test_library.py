"""Operators of ``torch.library`` stay calls where fake tensors have a rule for them, and are named where not."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

import memrewrite
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.dropin import programs

WIDTH = 32
LIBRARY = torch.library.Library("memrewrite_tests", "DEF")
LIBRARY.define("tangent(Tensor x) -> Tensor")
LIBRARY.impl("tangent", lambda x: torch.from_numpy(np.tan(x.detach().numpy())), "CPU")


def _cosine(x: Tensor) -> Tensor:
    return torch.from_numpy(np.cos(x.detach().numpy()))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _slope(context: Any, gradient: Tensor) -> Tensor:
    found: Tensor = -gradient * context.saved_tensors[0].sin()
    return found


COUNTER = itertools.count(1)
RUNS: list[str] = []


def _counted(x: Tensor) -> Tensor:
    RUNS.append("counted")
    return x * next(COUNTER)


def _drawn(x: Tensor) -> Tensor:
    RUNS.append("drawn")
    return x * torch.rand_like(x)


def _drawn_by_numpy(x: Tensor) -> Tensor:
    RUNS.append("drawn by NumPy")
    return x * float(np.random.rand())


def made(name: str, fake: bool, function: Callable[[Tensor], Tensor] = _cosine) -> Any:
    operator: Any = torch.library.custom_op(f"memrewrite_tests::{name}", function, mutates_args=())
    if fake:
        operator.register_fake(torch.empty_like)
    operator.register_autograd(_slope, setup_context=_keep)
    return operator


def _launched(x: Tensor) -> Tensor:
    """What a ``triton_op`` does on fake tensors: it launches a kernel, which is an operator of higher order there."""
    made = torch.empty_like(x)
    triton_kernel_wrapper_mutation(
        kernel_idx=0, constant_args_idx=0, grid=[(1, 1, 1)], tma_descriptor_metadata={}, kwargs={"x": x, "made": made}
    )
    return made


OPERATORS = {
    "ruled": made("ruled", fake=True),
    "unruled": made("unruled", fake=False),
    "counted": made("counted", True, _counted),
    "drawn": made("drawn", True, _drawn),
    "drawn_by_numpy": made("drawn_by_numpy", True, _drawn_by_numpy),
    "tangent": torch.ops.memrewrite_tests.tangent,
    "launched": made("launched", fake=False),
}
OPERATORS["launched"].register_fake(_launched)


class Calls(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.name = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), name

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(OPERATORS[self.name](torch.sigmoid(layer(x))) + x.sin().exp().cos())
        return x


@pytest.mark.parametrize("name", ["ruled", "launched"])
def test_an_operator_with_a_rule_is_called_in_the_plan(name: str) -> None:
    result: Any = memrewrite.optimize(Calls(name), torch.randn(64, WIDTH), budget="min")
    assert result.report.verdict.startswith("bit-equal")
    assert result.report.segments
    assert f"memrewrite_tests.{name}.default(" in programs(result)[""].source
    assert f"What stays a call as the model makes it: memrewrite_tests::{name}." in result.report.notes


@pytest.mark.parametrize("name", ["counted", "drawn_by_numpy"])
def test_one_that_does_not_repeat_runs_once_a_step(name: str) -> None:
    x = torch.randn(64, WIDTH)
    result: Any = memrewrite.optimize(Calls(name), x, budget="min", verify=False)
    assert result.report.segments
    RUNS.clear()
    result(x).sum().backward()
    assert len(RUNS) == len(result.layers)


def test_one_that_draws_draws_the_same_where_it_runs_again() -> None:
    x, model = torch.randn(64, WIDTH), Calls("drawn")
    result: Any = memrewrite.optimize(model, x, budget="min", verify=False)
    found = []
    for each in (result, model):
        torch.manual_seed(1)
        RUNS.clear()
        found.append(torch.autograd.grad(each(x).square().sum(), [*each.parameters()]))
        assert (len(RUNS) > len(model.layers)) == (each is result)
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("name", ["unruled", "tangent"])
def test_one_without_is_refused_by_name(name: str) -> None:
    words = rf"calls the operator memrewrite_tests::{name} \(at test_library\.py:\d+\), .*register_fake"
    with pytest.raises(CaptureError, match=words):
        memrewrite.optimize(Calls(name), torch.randn(64, WIDTH))
