"""What operators are said to take on CUDA, beside what was measured there and what Inductor writes for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as settings
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from memrewrite.runtime import fused, kernels
from memrewrite.targets.cuda_scratch import Scratch
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from tests.support.cuda_code import held_by_cuda_code

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("texts", "megabytes"), [(60, 2029.0), (8, 270.5), (7, 236.7)])
def test_what_attention_by_cudnn_takes_in_its_backward(texts: int, megabytes: float) -> None:
    """Measured on an H200, PyTorch 2.11, at 32 heads and 8 of keys, 2,048 tokens."""
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    with FakeTensorMode():
        queries, keys = e(texts, 32, 2048, 64), e(texts, 8, 2048, 64)
        found = Scratch().lookup(backward, (queries, queries, keys, keys), {}).bytes
    assert round(found / 1e6, 1) == megabytes


@pytest.mark.parametrize("count", [128256, 60 * 2048 + 1])
def test_what_the_gradient_of_an_embedding_takes(count: int) -> None:
    """1,114.3 MB beyond its result on an H200, PyTorch 2.11."""
    words, width, backward = 60 * 2048, 2048, torch.ops.aten.embedding_dense_backward.default
    with FakeTensorMode():
        rows, indices = torch.empty(words, width, dtype=BF16), torch.empty(words, dtype=torch.int64)
        whole = Scratch().lookup(backward, (rows, indices, count, -1, False), {}).bytes
        assert round(whole / 1e6, 1) == 1114.3
        part = Scratch().lookup(backward, (rows[:, :256], indices, count, -1, False), {}).bytes
        assert part < 1.6 * whole * 256 / width  # with a copy of the rows
        few = (rows[:3072], indices[:3072], count, -1, False)
        assert Scratch().lookup(backward, few, {}).bytes == 0


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def norm_and_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary(norm(x, weight).transpose(1, 2), cos, sin)


def gate(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def soft_cap_of_sum(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return 30.0 * torch.tanh((x + y * scale) / 30.0)


def e(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(sizes, dtype=dtype)


def of_heads(texts: int, tokens: int, heads: int, width: int) -> Tensor:
    return e(texts, tokens, heads, width).transpose(1, 2)


Case = tuple[Callable[..., Tensor], Callable[[], list[Tensor]], list[bool], Callable[[], Tensor]]
CASES: dict[str, Case] = {
    "norm of a Llama": (norm, lambda: [e(60, 2048, 2048), e(2048)], [True, True], lambda: e(60, 2048, 2048)),
    "norm of few texts": (norm, lambda: [e(2, 2048, 2048), e(2048)], [True, True], lambda: e(2, 2048, 2048)),
    "odd sizes": (norm, lambda: [e(48, 2048, 1152), e(1152)], [True, True], lambda: e(48, 2048, 1152)),
    "frozen weight": (norm, lambda: [e(16, 512, 1024), e(1024)], [True, False], lambda: e(16, 512, 1024)),
    "norm and rotary of Qwen3": (
        norm_and_rotary,
        lambda: [e(12, 4096, 16, 128), e(128), e(1, 1, 4096, 128), e(1, 1, 4096, 128)],
        [True, True, False, False],
        lambda: of_heads(12, 4096, 16, 128),
    ),
    "rotary": (
        rotary,
        lambda: [of_heads(8, 2048, 32, 64), e(1, 1, 2048, 64), e(1, 1, 2048, 64)],
        [True, False, False],
        lambda: of_heads(8, 2048, 32, 64),
    ),
    "gate": (gate, lambda: [e(8, 2048, 8192), e(8, 2048, 8192)], [True, True], lambda: e(8, 2048, 8192)),
    "layer norm": (
        layer_norm,
        lambda: [e(32, 512, 768, dtype=F32), e(768, dtype=F32), e(768, dtype=F32)],
        [True, True, True],
        lambda: e(32, 512, 768, dtype=F32),
    ),
    "weight of a sum": (
        soft_cap_of_sum,
        lambda: [e(8, 2048, 1024), e(8, 2048, 1024), e(1024)],
        [True, True, True],
        lambda: e(8, 2048, 1024),
    ),
}


def slopes_of(case: Case) -> tuple[Callable[..., list[Tensor]], list[Tensor], tuple[Any, ...]]:
    """A chain's backward as it is compiled, its arguments, and the call of the operator."""
    chain, make, wanted, gradient = case
    given, gradients = make(), [gradient()]
    orders = [dim for t, need in zip(given, wanted, strict=True) if need for dim in fused._order(t)]
    fused.CHAINS[chain.__name__] = chain
    kernel = fused._slopes_of(chain.__name__, chain, len(given), tuple(wanted), tuple(orders))
    call = chain.__name__, given, gradients, wanted, orders
    return lambda *values: list(kernel._function(values)), [*given, *gradients], call


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_chain_takes_is_what_inductor_writes_for_it(case: Case) -> None:
    """No less, and no value of all rows: those are what is given and what is made."""
    operator = torch.ops.memrewrite.chain_slopes.default
    with FakeTensorMode():
        slopes, given, call = slopes_of(case)
        told = Scratch().lookup(operator, call, {}).bytes
    with settings.patch(kernels._SETTINGS):
        held = held_by_cuda_code(slopes, given)
    assert held <= told <= 1.5 * held + 512
    assert told < 0.04 * given[0].nbytes


def test_without_our_settings_a_value_of_all_rows_is_stored() -> None:
    with FakeTensorMode():
        slopes, given, _ = slopes_of(CASES["norm and rotary of Qwen3"])
    assert held_by_cuda_code(slopes, given) > given[0].nbytes
