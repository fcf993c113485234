"""Operators of ``torch.library`` stay calls where fake tensors have a rule for them, and are named where not."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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


def made(name: str, fake: bool) -> Any:
    operator: Any = torch.library.custom_op(f"memrewrite_tests::{name}", _cosine, mutates_args=())
    if fake:
        operator.register_fake(torch.empty_like)
    operator.register_autograd(_slope, setup_context=_keep)
    return operator


OPERATORS = {
    "ruled": made("ruled", fake=True),
    "unruled": made("unruled", fake=False),
    "tangent": torch.ops.memrewrite_tests.tangent,
}


class Calls(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.name = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)), name

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(OPERATORS[self.name](torch.sigmoid(layer(x))))
        return x


def test_an_operator_with_a_rule_is_called_in_the_plan() -> None:
    result: Any = memrewrite.optimize(Calls("ruled"), torch.randn(64, WIDTH), budget="min")
    assert result.report.verdict.startswith("bit-equal")
    assert result.report.segments
    assert "memrewrite_tests.ruled.default(" in programs(result)[""].source


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("name", ["unruled", "tangent"])
def test_one_without_is_refused_by_name(name: str) -> None:
    words = rf"calls the operator memrewrite_tests::{name} \(at test_library\.py:\d+\), .*register_fake"
    with pytest.raises(CaptureError, match=words):
        memrewrite.optimize(Calls(name), torch.randn(64, WIDTH))
