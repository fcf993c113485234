"""Backward of attention sums in one order while models are compared, and nothing else has to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memrewrite.equivalence import attention
from memrewrite.equivalence.trial import deterministic, take_step
from memrewrite.torch_internals.autograd_nodes import nodes_behind
from memrewrite.workload.step import Inputs, Step

STRICT: list[bool] = []


class Watched(torch.autograd.Function):
    """Notes whether what has no deterministic algorithm would be an error while backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        strict = not torch.is_deterministic_algorithms_warn_only_enabled()
        STRICT.append(torch.are_deterministic_algorithms_enabled() and strict)
        if ctx.fails:
            raise torch.OutOfMemoryError
        return gradient * 2, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        return Watched.apply(self.linear(Watched.apply(x, False)), self.fails)  # type: ignore[no-untyped-call]


def step_of(net: Net) -> None:
    del STRICT[:]
    take_step(net, Inputs((torch.ones(2, 8),), {}), Step(), None, (), True)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    monkeypatch.setattr(attention, "_ORDERED", ("WatchedBackward",))
    return Net()


def test_attention_sums_in_one_order_while_backward_of_it_runs(net: Net) -> None:
    with deterministic():
        step_of(net)
        assert STRICT == [True, True]
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_nothing_stays_strict_after_an_error(net: Net) -> None:
    net.fails = True
    with deterministic():
        with pytest.raises(torch.OutOfMemoryError):
            step_of(net)
        assert STRICT == [True]
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_steps_are_as_the_user_has_them_where_nothing_is_compared(net: Net) -> None:
    step_of(net)
    assert STRICT == [False, False]


def test_cudnn_leaves_attention_to_kernels_that_sum_in_one_order() -> None:
    """Where it alone may compute attention, it has to."""
    enabled: Any = torch.backends.cuda.cudnn_sdp_enabled
    before = enabled()
    with deterministic():
        assert not enabled()
    assert enabled() == before
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with deterministic():
            assert enabled()
        assert enabled()


def test_nodes_of_attention_are_called_so() -> None:
    """On the CPU, where it sums in one order anyway, as on CUDA."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    names = [node.name() for node in nodes_behind([scaled_dot_product_attention(q, q, q).sum()])]
    assert [name for name in names if name.startswith("ScaledDotProductFlashAttention")]
