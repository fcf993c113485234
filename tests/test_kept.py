"""Attention that a segment keeps is not run again, and nothing else changes, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memrewrite.private import TorchDispatchMode
from memrewrite.runtime.segment import keep
from tests.dropins import Segmented, assert_same_bits, loss_of, peak, segmented, step
from tests.test_segments import CALLS, Size

USES = [None, *(call for call in CALLS if call.__name__ != "with_graph")]  # attention has no second derivative
SIZES: tuple[Size, ...] = (100, 9, (100, 12), (100, 30, 7))


class Block(nn.Module):
    """Attention between a norm and a product, with dropout in it and after it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.first = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        y = functional.dropout(self.first(y.transpose(1, 2).flatten(-2)), self.dropout)
        return x + torch.tanh(y)


def model(dropout: float = 0.0, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(width, dropout), Block(width, dropout))


def tokens(length: int = 8, width: int = 16) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1))


def kept(dropout: float = 0.0, size: Size = 100, keeping: bool = True, amp: torch.dtype | None = None) -> Segmented:
    return segmented(model(dropout), tokens(), size=size, keeping=keeping, amp=amp)


class Attentions(TorchDispatchMode):
    """Counts how often attention runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "scaled_dot_product" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("keeping", "runs"), [(True, 2), (False, 4)], ids=["kept", "run again"])
def test_attention_runs_once(size: Size, keeping: bool, runs: int) -> None:
    found = kept(size=size, keeping=keeping)
    with Attentions() as attentions:
        loss_of(found.module(tokens())).backward()
    assert attentions.count == runs if keeping else attentions.count >= runs


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("call", USES, ids=lambda call: getattr(call, "__name__", "step"))
def test_every_number_is_the_same(call: Any, dropout: float, size: Size) -> None:
    found = kept(dropout, size)
    if call is None:
        assert_same_bits(step(found.module, tokens()), step(model(dropout), tokens()))
    else:
        assert_same_bits(step(found.module, tokens(), call), step(model(dropout), tokens(), call))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_autocast(dropout: float) -> None:
    def call(module: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    found = kept(dropout, amp=torch.bfloat16)
    assert_same_bits(step(found.module, tokens(), call), step(model(dropout), tokens(), call))


class Grouped(nn.Module):
    """Two heads of queries to each head of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.kv))
        y = functional.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def test_grouped_heads() -> None:
    torch.manual_seed(0)
    grouped = Grouped()
    module: Any = segmented(grouped, tokens(), size=100, keeping=True).module
    assert "keep(recomputing" in module._memrewrite.source
    assert_same_bits(step(module, tokens()), step(grouped, tokens()))


def test_what_is_kept_is_all_that_is_held() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(*(Block(64, 0.0) for _ in range(6))), tokens(64, 64)
    size = x.nbytes
    without, within = (peak(segmented(plain, x, size=15, keeping=keeping).module, x) for keeping in (False, True))
    assert without <= within <= without + 6 * 1.5 * size
    assert within < 0.6 * peak(plain, x)


def test_outside_a_segment_it_just_runs() -> None:
    x = torch.ones(3, requires_grad=True)
    assert keep(False, 0, False, torch.sin, x).equal(x.sin())
