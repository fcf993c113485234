"""An embedding and a head of one weight make one gradient of it, of the same bits, and never two of its size."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.passes.tied_embeddings import TiedEmbeddings
from memrewrite.records.errors import NotEquivalentError
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.tied_embedding import tied_embedding
from memrewrite.simulate.memory.tracker import Tracker
from tests.passes.helpers import (
    FRONT_ENDS,
    assert_same_bits,
    functional,
    language_step,
    numbers,
    rewrite,
    rewrites,
    targets,
)
from tests.support.compiled import compiled_bytes

WORDS, WIDTH, PADDING = 40, 6, 3
Function = Callable[[Any, Tensor], Any]
PASS = TiedEmbeddings()


class Tied(nn.Module):
    """``function(self, tokens)`` with two embeddings and two heads of one weight at hand."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.words, self.padded = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.head, self.shifted = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, WORDS)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.padded.weight = self.head.weight = self.shifted.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.function(self, tokens)


def example(rows: int = 3) -> Tensor:
    """Some words are there more than once, and the one that stands for padding is, too."""
    tokens = torch.randint(12, (rows, 4), generator=torch.Generator().manual_seed(1))
    tokens[0, 0] = tokens[1, 2] = PADDING
    return tokens


SPELLINGS: dict[str, Function] = {
    "embedding and head": lambda m, t: m.head(m.between(m.words(t)).tanh()),
    "padding": lambda m, t: m.head(m.between(m.padded(t)).tanh()),
    "bias": lambda m, t: m.shifted(m.words(t).tanh()),
    "functional": lambda m, t: F.linear(F.embedding(t, m.words.weight, PADDING - WORDS).tanh(), m.words.weight),
    "two heads": lambda m, t: m.head(m.words(t)).sum(-1) + m.shifted(m.words(t)).sum(-1),
    "two embeddings": lambda m, t: m.words(t).tanh() * m.padded(t.flip(1)),
    "tokens read later": lambda m, t: m.words(t).tanh() * m.padded(u := t.flip(1)) * (u != PADDING).unsqueeze(-1),
    "two embeddings and a head": lambda m, t: m.head(m.between(m.words(t)) * m.words(t.flip(1)).tanh()),
    "head between": lambda m, t: m.head(m.words(t)).sum(-1, keepdim=True) * m.words(t.flip(1)).tanh(),
}


def operations(graph_module: fx.GraphModule) -> int:
    return targets(graph_module).count(tied_embedding.__name__)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS)
def test_gradients_have_the_same_bits(function: Function, front_end: str) -> None:
    model, tokens = Tied(function), example()
    graph_module, result = functional(model, tokens, PASS, front_end)
    assert result.applied, result.refused
    assert operations(graph_module)
    assert_same_bits(numbers(graph_module, tokens, model), numbers(model, tokens, model))


@pytest.mark.parametrize("rows", [1, 9, 30], ids=["few", "nearly as many as words", "more than words"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_of_any_type_and_number_of_tokens(rows: int, dtype: torch.dtype) -> None:
    model, tokens = Tied(SPELLINGS["padding"]).to(dtype), example(max(rows, 2))[:rows]
    graph_module, _ = functional(model, tokens, PASS, "export")
    assert_same_bits(numbers(graph_module, tokens, model), numbers(model, tokens, model))


@pytest.mark.parametrize("rows", [9, 30], ids=["few tokens", "more than words"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_some_columns_at_a_time(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[tied_embedding.__module__]
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    monkeypatch.setattr(module, "_NARROW", 4)
    assert [*module._columns(rows, WIDTH)] == [slice(0, 4), slice(4, 8)]
    model, tokens = Tied(SPELLINGS["padding"]).to(dtype), example(rows)
    graph_module, _ = functional(model, tokens, PASS, "export")
    assert_same_bits(numbers(graph_module, tokens, model), numbers(model, tokens, model))


@pytest.mark.parametrize("way", ["_add_rows", "_add_all"])
def test_no_sums_of_all_columns_are_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[tied_embedding.__module__]
    total, rows, indices = torch.zeros(300, 1024), torch.randn(200, 1024), torch.randint(300, (200,))
    peaks = []
    for at_once in (module._AT_ONCE, 1):
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        with Tracker("cpu") as tracker:
            getattr(module, way)(total, rows, indices, -1)
        peaks.append(tracker.peak)
    assert peaks[1] < peaks[0] - 0.7 * rows.nbytes


REFUSED: dict[str, tuple[Function, str]] = {
    "one reader": (lambda m, t: m.words(t).tanh(), ""),
    "read before": (lambda m, t: m.head(m.between.weight).sum() + m.words(t), ""),
    "read otherwise": (lambda m, t: m.head(m.words(t)) + m.words.weight.sum(), "may share the gradient"),
    "added up": (lambda m, t: F.linear(m.words(t), m.words.weight + m.head.weight), "may share the gradient"),
    "multiplied by itself": (lambda m, t: m.words(t).sum() + F.linear(m.head.weight, m.head.weight), "may share"),
    "scaled": (lambda m, t: m.head(F.embedding(t, m.words.weight, scale_grad_by_freq=True)), "scales its gradient"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_stays(function: Function, reason: str) -> None:
    graph_module, result = rewrite(Tied(function), example(), [PASS])
    assert not result.applied
    assert not operations(graph_module)
    assert bool(reason) == bool(result.refused)
    assert reason in "".join(each.reason for each in result.refused)


class Halves(nn.Module):
    """Two embeddings of one weight, which a head outside of what can be a region reads, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Tied(lambda m, t: m.between(m.words(t).tanh()) + m.between(m.words(t.flip(1)).tanh()).tanh())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.inner.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if int(tokens.max()) > WORDS:
            raise ValueError("There is no such word.")
        found: Tensor = self.head(self.inner(tokens)).square()
        return found


def test_what_is_read_outside_of_a_region_stays() -> None:
    model, tokens = Halves(), example(16)
    result: Any = memrewrite.optimize(model, (tokens,), passes=("tied_embeddings",), regions=("inner",), exact=True)
    assert not result.report.rewrites
    assert "another order" in str(result.report)
    assert "tied_embedding" in str(memrewrite.optimize(model.inner, (tokens,), passes=("tied_embeddings",)).report)


def test_what_is_frozen_stays() -> None:
    model = Tied(SPELLINGS["embedding and head"])
    model.words.weight.requires_grad_(False)
    graph_module, result = rewrite(model, example(), [PASS])
    assert not operations(graph_module)
    assert not result.applied
    assert not result.refused


def by_hand(weight: Tensor, tokens: Tensor, padding: int = PADDING) -> Tensor:
    rows, again = tied_embedding(weight, tokens, padding)
    return F.linear(rows.tanh(), again).square()


def plainly(weight: Tensor, tokens: Tensor) -> Tensor:
    return F.linear(F.embedding(tokens, weight, PADDING).tanh(), weight).square()


def weight_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


def test_gradients_of_gradients() -> None:
    weight, tokens = weight_of(), example()
    assert torch.autograd.gradcheck(lambda w: by_hand(w, tokens, -1), weight)
    assert torch.autograd.gradgradcheck(lambda w: by_hand(w, tokens, -1), weight)


def test_backward_goes_again_where_the_graph_is_kept() -> None:
    weight, tokens = weight_of(), example()
    loss = by_hand(weight, tokens).sum()
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(plainly(weight, tokens).sum(), weight)[0])


@pytest.mark.parametrize("which", [0, 1], ids=["rows", "weight"])
def test_one_result_may_be_all_that_is_used(which: int) -> None:
    weight, tokens = weight_of(), example()
    (gradient,) = torch.autograd.grad(tied_embedding(weight, tokens)[which].sum(), weight)
    expected = torch.autograd.grad((F.embedding(tokens, weight) if which == 0 else weight).sum(), weight)[0]
    assert torch.equal(gradient, expected)


def test_under_function_transforms() -> None:
    weight, tokens = weight_of().detach(), example()
    ours, theirs = (torch.func.grad(lambda w, f=f: f(w, tokens).sum())(weight) for f in (by_hand, plainly))
    assert torch.equal(ours, theirs)


def test_compiles_to_the_whole() -> None:
    weight, tokens = weight_of(), example()
    torch.compiler.reset()
    compiled = torch.compile(by_hand, backend="aot_eager", fullgraph=True)
    ours, theirs = (torch.autograd.grad(f(weight, tokens).sum(), weight)[0] for f in (compiled, plainly))
    torch.testing.assert_close(ours, theirs)


def test_compiled_the_gradient_of_the_embedding_is_made_in_its_own_type() -> None:
    tokens = torch.randint(4096, (8, 4))

    def peak(function: Callable[[Tensor, Tensor], Tensor]) -> int:
        class Looked(nn.Embedding):
            def forward(self, tokens: Tensor) -> Tensor:
                return function(self.weight, tokens)

        words = Looked(4096, 64, dtype=torch.bfloat16)
        return compiled_bytes(words, lambda module: module(tokens).float().sum()).peak

    assert peak(by_hand) < peak(plainly) - 4096 * 64 * 2


def test_there_is_one_gradient_of_that_size() -> None:
    weight, tokens = torch.randn(4096, 64, requires_grad=True), torch.randint(4096, (8, 4))
    peaks = []
    for function in (by_hand, plainly):
        weight.grad = None
        loss = function(weight, tokens).sum()
        with Tracker("cpu") as tracker:
            loss.backward()
        peaks.append(tracker.peak)
    assert peaks[0] < peaks[1] - 0.9 * weight.nbytes
    assert weight.grad is not None


class Words(nn.Module):
    """A language model that is all words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(3000, 64), nn.Linear(64, 3000, bias=False)
        self.body = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.words(tokens))).flatten(0, 1), labels.flatten())


def optimized(tokens: Tensor, **options: Any) -> Any:
    return memrewrite.optimize(Words(), (tokens,), example_kwargs={"labels": tokens}, optimizer="sgd", **options)


def test_the_lowest_peak_of_a_model_has_one_gradient() -> None:
    tokens = torch.randint(3000, (2, 2))
    with_it = optimized(tokens, budget="min")
    without = optimized(tokens, budget="min", passes=["checkpoint_segments"], verify=False)
    assert with_it.report.verdict.startswith("bit-equal")
    assert PASS.name in rewrites(with_it.report)
    lower = without.report.predicted_after.peak - with_it.report.predicted_after.peak
    assert lower > 0.5 * with_it.words.weight.nbytes


def test_artifact_and_copies_have_it(tmp_path: Path) -> None:
    tokens = torch.randint(3000, (2, 8))
    result = optimized(tokens, budget="min", verify=False)
    save(result, tmp_path / "out")
    arrived = memrewrite.load(tmp_path / "out", Words())
    arrived.load_state_dict(result.state_dict())
    assert "tied_embedding(" in programs(result)[""].source
    expected = language_step(Words(), tokens)
    for other in (result, arrived, copy.deepcopy(result)):
        assert_same_bits(language_step(other, tokens), expected)


def test_a_wrong_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[tied_embedding.__module__]
    right = module._add_rows

    def wrong(total: Tensor, rows: Tensor, indices: Tensor, padding_idx: int) -> None:
        right(total, rows, (indices + 1) % len(total), padding_idx)

    monkeypatch.setattr(module, "_add_rows", wrong)
    with pytest.raises(NotEquivalentError):
        optimized(torch.randint(3000, (2, 8)), budget="min")
