"""Attention that a segment keeps is not run again, and nothing else changes, bit for bit."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from memrewrite.runtime.segment import keep
from memrewrite.torch_internals.fake_tensors import TorchDispatchMode
from tests.runtime.test_segments import CALLS, Size
from tests.support.dropins import Segmented, assert_same_bits, loss_of, peak, segmented, step

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


class Made(TorchDispatchMode):
    """Notes the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            storage = result.untyped_storage()
            self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """The bytes of those that something still holds."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


def model(dropout: float = 0.0, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(width, dropout), Block(width, dropout))


def tokens(length: int = 8, width: int = 16) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1))


@functools.cache  # a step leaves the module as it is
def kept(
    dropout: float = 0.0,
    size: Size = 100,
    amp: torch.dtype | None = None,
    *,
    keeping: bool = True,
    compiled: bool = False,
) -> Segmented:
    return segmented(model(dropout), tokens(), size=size, amp=amp, keeping=keeping, compiled=compiled)


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
@pytest.mark.parametrize("compiled", [False, True], ids=["attention kept", "products kept"])
def test_every_number_is_the_same(compiled: bool, call: Any, dropout: float, size: Size) -> None:
    found = kept(dropout, size, compiled=compiled)
    if call is None:
        assert_same_bits(step(found.module, tokens()), step(model(dropout), tokens()))
    else:
        assert_same_bits(step(found.module, tokens(), call), step(model(dropout), tokens(), call))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("compiled", [False, True], ids=["attention kept", "products kept"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_autocast(size: Size, compiled: bool, dropout: float) -> None:
    def call(module: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    found = kept(dropout, size, torch.bfloat16, compiled=compiled)
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


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_a_kept_product_holds_its_result_and_neither_input_nor_casts(amp: torch.dtype | None) -> None:
    """Its input is saved as a view of two dimensions, and under autocast as a copy; both are made again."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Tanh(), nn.Linear(256, 16), nn.Tanh()), torch.randn(32, 8, 256)

    def held(keeping: bool) -> int:
        module = segmented(net, x, size=100, amp=amp, keeping=keeping, compiled=keeping).module
        with torch.autocast("cpu", amp, enabled=amp is not None), Made() as made:
            output = module(x)
        return made.alive() - output.nbytes

    element = 4 if amp is None else amp.itemsize
    assert (held(keeping=False), held(keeping=True)) == (0, 32 * 8 * 16 * element)
