"""Attention that models write themselves: the same numbers in pieces, whose scores never exist for all texts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.passes.attention_in_pieces import AttentionInPieces
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.tiles import in_pieces
from tests.passes.helpers import FRONT_ENDS, assert_as_good, functional, rewrite, rewrites, targets

TEXTS, HEADS, LENGTH, HEAD = 3, 2, 12, 2
WIDTH = HEADS * HEAD
PASS = AttentionInPieces()
Function = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """``function(self, q, k, v)`` of what is projected, of heads where there are ``heads``."""

    def __init__(self, function: Function, heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.heads = function, heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.heads:
            q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        made = self.function(self, q, k, v)
        result: Tensor = self.out(made.transpose(1, 2).flatten(2) if self.heads else made)
        return result


def example(texts: int = TEXTS) -> Tensor:
    return torch.randn(texts, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def plain(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 1.4).softmax(-1) @ v


def masked(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT).masked_fill(m.mask == 0, float("-inf"))
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).type_as(q), 0.1, training=False)
    return torch.matmul(weights, v)


def biased(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + m.bias).softmax(-1) @ v


def flat(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second, third = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(m.bias.detach().repeat(len(q), 1, 1), first, second.mT, alpha=0.5)
    return torch.bmm(scores.softmax(-1), third).view(q.shape)


def regrouped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second, third = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.bmm(first, second.mT).reshape(len(q), HEADS, LENGTH, LENGTH) + m.bias
    return torch.bmm(scores.softmax(-1).flatten(0, 1), third).view(q.shape)


def viewed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second, third = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.bmm(first, second.mT).view(len(q), HEADS, LENGTH, LENGTH)
    weights = scores.masked_fill(m.mask == 0, float("-inf")).softmax(-1)
    return torch.bmm(weights.view(-1, LENGTH, LENGTH), third).view(q.shape)


def unread(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    weights.mean(1)  # as nn.MultiheadAttention makes for whoever does not want it
    return weights @ v


def by_letters(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def heads_last(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second, third = (each.transpose(1, 2) for each in (q, k, v))
    weights = torch.einsum("nqhd,nkhd->nhqk", first, second).softmax(3)
    return torch.einsum("nhqk,nkhd->nqhd", weights, third).transpose(1, 2)


SPELLINGS: dict[str, tuple[Function, int]] = {
    "plain": (plain, HEADS),
    "one head": (plain, 1),
    "no heads": (plain, 0),
    "masked": (masked, HEADS),
    "biased": (biased, HEADS),
    "flat": (flat, HEADS),
    "regrouped": (regrouped, HEADS),
    "viewed": (viewed, HEADS),
    "unread": (unread, HEADS),
}
EXPORTED: dict[str, tuple[Function, int]] = {"letters": (by_letters, HEADS), "heads last": (heads_last, HEADS)}


def check(function: Function, heads: int, texts: int, front_end: str) -> None:
    model, x = Attention(function, heads), example(texts)
    graph_module, result = functional(model, x, PASS, front_end)
    assert result.applied, result.refused
    assert "softmax.int" not in targets(graph_module)
    assert_as_good(graph_module, model, x)


@pytest.mark.parametrize("texts", [1, TEXTS])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("function", "heads"), SPELLINGS.values(), ids=SPELLINGS)
def test_runs_in_pieces(function: Function, heads: int, front_end: str, texts: int) -> None:
    check(function, heads, texts, front_end)


@pytest.mark.parametrize(("function", "heads"), EXPORTED.values(), ids=EXPORTED)
def test_sums_by_letters_run_in_pieces(function: Function, heads: int) -> None:
    check(function, heads, TEXTS, "export")


def used_elsewhere(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.amax(-1, keepdim=True)


def of_itself(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one = q[:1, :1]
    return ((one @ one.mT).softmax(-1) @ one).expand_as(v)


REFUSED: dict[str, tuple[Function, str]] = {
    "random": (lambda m, q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v, "at random"),
    "used": (used_elsewhere, "used elsewhere"),
    "of itself": (of_itself, "the places"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_stays(function: Function, reason: str) -> None:
    _, result = rewrite(Attention(function), example(), [PASS])
    assert not result.applied
    assert [reason in each.reason for each in result.refused] == [True]


OTHERS: dict[str, Function] = {
    "of heads that vary": lambda m, q, k, v: (
        ((q.flatten(0, 1) @ k.flatten(0, 1).mT).view(HEADS, len(q), *m.bias.shape[1:]).softmax(-1).flatten(0, 1))
        @ v.flatten(0, 1)
    ).view(q.shape),
    "of no rows": lambda m, q, k, v: (q @ k.mT).softmax(-2) @ v,
    "of two products": lambda m, q, k, v: (q @ k.mT + k @ q.mT).softmax(-1) @ v,
    "of no product": lambda m, q, k, v: m.bias.softmax(-1) @ v,
    "small": lambda m, q, k, v: ((q[..., :2, :] @ k[..., :2, :].mT).softmax(-1) @ v[..., :2, :]).repeat(1, 1, 6, 1),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_other_functions_are_none(function: Function) -> None:
    _, result = rewrite(Attention(function), example(), [PASS])
    assert not result.applied
    assert not result.refused


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def part(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v

    def found(*given: Tensor) -> Tensor:
        result: Tensor = in_pieces(part, (0, 1, 2), -3, 2, *given)
        return result

    assert torch.autograd.gradcheck(found, (q, k, v, bias))
    assert torch.autograd.gradgradcheck(found, (q, k, v, bias))


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 4).softmax(-1) @ v


def test_gradients_of_keys_are_as_good_where_pieces_are_of_rows() -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 256, 16) for _ in range(3)]

    def slopes(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.bfloat16().to(dtype).requires_grad_() for each in given]
        return [slope.double() for slope in torch.autograd.grad(function(*leaves).square().sum(), leaves[1:])]

    exact, whole = slopes(attended, torch.float64), slopes(attended, torch.bfloat16)
    ours = slopes(lambda *leaves: in_pieces(attended, (0,), -2, 16, *leaves), torch.bfloat16)
    for reference, one, other in zip(exact, ours, whole, strict=True):
        assert (one - reference).norm() < 1.2 * (other - reference).norm()


@pytest.mark.parametrize("texts", [0, 1, 5])
def test_any_number_of_texts(texts: int) -> None:
    q, k, v = (torch.randn(texts, 5, 3) for _ in range(3))
    torch.testing.assert_close(in_pieces(attended, (0, 1, 2), -3, 2, q, k, v), attended(q, k, v))


class Layers(nn.Module):
    """Layers of attention that is written out, and ``nn.MultiheadAttention`` that is asked for weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.last = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.qkv:
            q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in layer(x).chunk(3, -1))
            scores = q @ k.mT / 8**0.5
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        result: Tensor = x + self.last(x, x, x)[0]
        return result


def optimized(mode: Literal["train", "inference"] = "train", **options: Any) -> Any:
    model, x = Layers().train(mode == "train"), torch.randn(8, 128, 16)
    return memrewrite.optimize(model, x, budget="min", optimizer="sgd", cache=False, mode=mode, **options)


def test_the_lowest_peak_is_far_lower_and_the_result_goes_everywhere(tmp_path: Path) -> None:
    with_it, without = optimized(), optimized(exact=True, verify=False)
    assert with_it.report.equivalent
    assert AttentionInPieces.name in rewrites(with_it.report)
    assert with_it.report.predicted_after.peak < 0.5 * without.report.predicted_after.peak
    assert programs(with_it)[""].source.count("in_pieces(chain_") == 4
    save(with_it, tmp_path / "out")
    original = Layers()
    for x in (torch.randn(8, 128, 16), torch.randn(3, 128, 16)):
        torch.testing.assert_close(with_it(x), original(x))
        for other in (memrewrite.load(tmp_path / "out", Layers()), copy.deepcopy(with_it)):
            torch.testing.assert_close(other(x), with_it(x), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"amp": "bf16"}, {"mode": "inference"}], ids=["bf16", "inference"])
def test_it_is_done_wherever_a_step_runs(options: dict[str, Any]) -> None:
    model, without = optimized(**options), optimized(**options, exact=True, verify=False)
    assert model.report.equivalent
    assert model.report.predicted_after.peak < 0.5 * without.report.predicted_after.peak


def test_who_wrote_it_is_told_what_takes_less() -> None:
    (note,) = [each for each in optimized(exact=True, verify=False).report.notes if "scaled_dot" in each]
    assert "written out 4 times, first in (root) (test_written_attention.py:" in note
    assert "1.0 MB (1.0 MiB) of scores" in note
    told = memrewrite.optimize(Layers(), torch.randn(8, 4, 16), cache=False, verify=False)
    assert not any("scaled_dot" in each for each in memrewrite.report_of(told).notes)
