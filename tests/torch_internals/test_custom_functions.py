"""Custom autograd.Functions are seen however they are applied, and only where a gradient may flow."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memrewrite.torch_internals.custom_functions import function_calls, functions_behind


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient


class SetUp(Double):
    """With a context of its own and an argument that has a default, which ``apply`` fills in."""

    @staticmethod
    def forward(x: Tensor, factor: int = 3) -> Tensor:  # type: ignore[override]
        return factor * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


class Overridden(Double):
    @classmethod
    def apply(cls, x: Tensor) -> Any:
        return super().apply(x)  # type: ignore[no-untyped-call]


BOUND_BEFORE: Callable[[Tensor], Any] = Double.apply


@pytest.mark.parametrize(
    ("apply", "kinds"),
    [
        pytest.param(lambda x: cast(Any, Double).apply(x), [Double], id="of-the-class"),
        pytest.param(lambda x: cast(Any, SetUp).apply(x), [SetUp], id="with-a-default"),
        pytest.param(lambda x: Overridden.apply(x), [Overridden], id="overridden"),
        pytest.param(lambda x: checkpoint(torch.sin, x, use_reentrant=True), [], id="of-torch"),
        pytest.param(lambda x: x.sin(), [], id="none"),
    ],
)
def test_functions_that_are_applied(apply: Callable[[Tensor], Tensor], kinds: list[type]) -> None:
    x = torch.ones(3, requires_grad=True)
    before = torch.autograd.Function.apply
    with function_calls() as calls:
        output = apply(x)
    assert calls == kinds
    assert functions_behind({"inner": [output.sum()]}) == kinds
    assert torch.autograd.Function.apply == before
    output.sum().backward()
    twin = x.detach().clone().requires_grad_()
    apply(twin).sum().backward()
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]


def test_none_counts_without_gradients() -> None:
    with function_calls() as calls, torch.no_grad():
        result = cast(Any, Double).apply(torch.ones(3, requires_grad=True))
    assert not calls
    assert not functions_behind(result)


def test_a_name_bound_before_is_found_behind_the_output() -> None:
    with function_calls() as calls:
        output = BOUND_BEFORE(torch.ones(3, requires_grad=True))
    assert not calls
    assert functions_behind(output + 1) == [Double]
