"""Attention some texts or heads at a time: the same numbers, and a backward that takes what a piece takes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.passes.attention_in_pieces import AttentionInPieces
from memrewrite.passes.tiles import Tiles
from memrewrite.runtime.attention import attention_in_pieces
from memrewrite.runtime.dropin import programs
from memrewrite.search import registry
from memrewrite.simulate.memory.tracker import Tracker
from tests.passes.helpers import FRONT_ENDS, assert_as_good, functional, numbers, rewrite, rewrites, targets

TEXTS, HEADS, LENGTH, HEAD = 3, 4, 5, 6
WIDTH = HEADS * HEAD
PASS = AttentionInPieces(pieces=2)
Function = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """``function(self, q, k, v)`` of what is projected, with ``shared`` heads of queries for each of keys."""

    def __init__(self, function: Function, shared: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // shared) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        result: Tensor = self.out(self.function(self, q, k, v).transpose(1, 2).flatten(2))
        return result


def example(texts: int = TEXTS) -> Tensor:
    return torch.randn(texts, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def mask() -> Tensor:
    return torch.ones(LENGTH, LENGTH).tril().bool()


def plain(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def grouped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


SPELLINGS: dict[str, tuple[Function, int]] = {
    "plain": (plain, 1),
    "causal": (lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), 1),
    "one mask": (lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, mask()), 1),
    "a mask for each text": (
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, mask().expand(len(q), 1, -1, -1)),
        1,
    ),
    "a mask for each head": (
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.bias.detach().expand(len(q), -1, -1, -1)),
        1,
    ),
    "a mask for each head of all texts": (
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.bias.detach()),
        1,
    ),
    "shared keys": (grouped, 2),
    "one head of keys": (grouped, HEADS),
}


@pytest.mark.parametrize("texts", [1, TEXTS])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("function", "shared"), SPELLINGS.values(), ids=SPELLINGS)
def test_runs_in_pieces(function: Function, shared: int, front_end: str, texts: int) -> None:
    model, x = Attention(function, shared), example(texts)
    graph_module, result = functional(model, x, PASS, front_end)
    if shared == HEADS and texts == 1:
        assert not result.applied
        assert "one text" in result.refused[0].reason
        return
    assert result.applied, result.refused
    assert "attention_in_pieces" in targets(graph_module)
    assert_as_good(graph_module, model, x)


REFUSED: dict[str, tuple[Function, str]] = {
    "random": (lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), "at random"),
    "a trained mask": (lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.bias), "mask is trained"),
    "texts alone": (
        lambda m, q, k, v: plain(m, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view(q.shape),
        "no texts and heads",
    ),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_stays(function: Function, reason: str) -> None:
    graph_module, result = rewrite(Attention(function), example(), [PASS])
    assert not result.applied
    assert "attention_in_pieces" not in targets(graph_module)
    assert reason in "".join(each.reason for each in result.refused)


Three = tuple[Tensor, Tensor, Tensor]


def given(dtype: torch.dtype = torch.float64, frozen: tuple[int, ...] = ()) -> Three:
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 3, 2, dtype=dtype, generator=made).requires_grad_(i not in frozen) for i in range(3))
    return q, k, v


def in_pieces(q: Tensor, k: Tensor, v: Tensor, pieces: int = 4) -> Tensor:
    return attention_in_pieces(q, k, v, None, pieces, is_causal=True)


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_gradients_of_gradients(pieces: int) -> None:
    tensors = given()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which alone differentiates twice
        assert torch.autograd.gradcheck(lambda q, k, v: in_pieces(q, k, v, pieces), tensors)
        assert torch.autograd.gradgradcheck(lambda q, k, v: in_pieces(q, k, v, pieces), tensors)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 2)])
def test_what_is_frozen_gets_nothing(frozen: tuple[int, ...]) -> None:
    q, k, v = given(frozen=frozen)
    wanted = [t for t in (q, k, v) if t.requires_grad]
    ours = torch.autograd.grad(in_pieces(q, k, v).square().sum(), wanted)
    theirs = torch.autograd.grad(whole(q, k, v).square().sum(), wanted)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("shape", [(3, 3), (4, 3, 3), (2, 1, 3, 3), (2, 4, 3, 3), (1, 4, 1, 3)], ids=str)
def test_a_mask_that_needs_a_gradient_later_gets_it(shape: tuple[int, ...], pieces: int) -> None:
    q, k, v = given(frozen=(2,))
    mask = torch.randn(shape, dtype=q.dtype, requires_grad=True)
    ours, theirs = attention_in_pieces(q, k, v, mask, pieces), F.scaled_dot_product_attention(q, k, v, mask)
    assert ours.stride() == theirs.stride()
    found, expected = (torch.autograd.grad(each.square().sum(), (q, k, mask)) for each in (ours, theirs))
    torch.testing.assert_close((ours, *found), (theirs, *expected))


def test_lies_in_memory_as_the_whole_does() -> None:
    q, k, v = (torch.randn(2, 5, 4, 8).transpose(1, 2) for _ in range(3))
    expected, found = whole(q, k, v), in_pieces(q, k, v)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


def test_under_autocast() -> None:
    model, x = Attention(plain), example()
    graph_module, _ = functional(model, x, PASS, "export")
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = numbers(graph_module, x, model), numbers(model, x, model)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        torch.testing.assert_close(value, theirs[name], rtol=2e-2, atol=2e-2)


def test_compiles_to_the_whole() -> None:
    compiled = torch.compile(in_pieces, backend="aot_eager", fullgraph=True)
    q, k, v = given(torch.float32)
    torch.testing.assert_close(compiled(q, k, v), whole(q, k, v))


def test_backward_takes_what_a_piece_takes() -> None:
    """With a mask that no kernel takes, which makes the scores of all heads."""
    q, k, v = (torch.randn(2, 8, 64, 4, requires_grad=True) for _ in range(3))
    zeros = torch.zeros(64, 64)
    peaks = []
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: attention_in_pieces(q, k, v, zeros, 8),
        lambda: F.scaled_dot_product_attention(q, k, v, zeros),
    )
    for function in ways:
        with Tracker("cpu") as tracker, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.autograd.grad(function().sum(), (q, k, v))
        peaks.append(tracker.peak)
    assert peaks[0] < 0.5 * peaks[1]


class Texts(nn.Module):
    """Layers of attention with scores that are made as a whole, which is most of what they take."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("mask", torch.zeros(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (8, 2)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads, self.mask).transpose(1, 2).flatten(2)
        return x


class Masked(nn.Module):
    """With a mask that is computed from an input with fractions, as PixArt and Sana are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        mask = ((1 - kept) * -10000.0)[:, None, None, :]
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (8, 2)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)
        return x


class Mixed(Texts):
    """With a wide part for each token, which may run some rows at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.down(F.gelu(self.up(x)))


def optimized(make: Callable[[], nn.Module] = Texts, budget: str | int = "min", **options: Any) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return memrewrite.optimize(make(), torch.randn(2, 64, 16), optimizer="sgd", budget=budget, **options)


def test_other_rewrites_for_the_lowest_peak_are_left_where_it_alone_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWEST, Tiles.name, lambda _: Tiles(rows=32))
    both = optimized(Mixed, verify=False).report
    assert {AttentionInPieces.name, Tiles.name} <= {*rewrites(both)}
    found = []
    for name in (Tiles.name, AttentionInPieces.name):
        without = tuple(each for each in registry.NAMES if each != name)
        peak = optimized(Mixed, passes=without, verify=False).report.predicted_after.peak
        found.append({*rewrites(optimized(Mixed, budget=peak, verify=False).report)} & {*registry.LOWEST})
        assert both.predicted_after.peak < peak
    assert found[0] == {AttentionInPieces.name}
    assert found[1] <= {AttentionInPieces.name}


def test_the_lowest_peak_has_it(tmp_path: Path) -> None:
    with_it, without = optimized(), optimized(exact=True, verify=False)
    assert with_it.report.equivalent
    assert AttentionInPieces.name in rewrites(with_it.report)
    assert with_it.report.predicted_after.peak < 0.6 * without.report.predicted_after.peak
    save(with_it, tmp_path / "out")
    assert "attention_in_pieces(" in programs(with_it)[""].source
    x = torch.randn(2, 64, 16)
    for other in (memrewrite.load(tmp_path / "out", Texts()), copy.deepcopy(with_it)):
        torch.testing.assert_close(other(x), with_it(x), rtol=0, atol=0)


class Pooled(nn.Module):
    """One query, the mean of a text, attends to all of it, as poolers of texts and images do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(torch.cat([x.mean(0, keepdim=True), x])).chunk(3, -1)
        heads = (part.reshape(-1, 8, 2).transpose(0, 1).unsqueeze(0) for part in (query[:1], key, value))
        return torch.as_tensor(self.out(F.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).reshape(1, -1)))


def test_dimensions_of_one_may_lie_otherwise() -> None:
    passes = ["attention_in_pieces", "checkpoint_segments"]
    model = memrewrite.optimize(Pooled(), torch.randn(96, 1, 16), budget="min", optimizer="sgd", passes=passes)
    assert memrewrite.report_of(model).equivalent


def test_a_mask_that_is_made_of_an_input_has_its_gradient_where_the_proof_asks_for_it() -> None:
    inputs, passes = (torch.randn(4, 64, 16), torch.ones(4, 64)), ["attention_in_pieces"]
    model = memrewrite.optimize(Masked(), inputs, budget="min", optimizer="sgd", passes=passes)
    assert "attention_in_pieces" in rewrites(memrewrite.report_of(model))
    assert memrewrite.report_of(model).equivalent
