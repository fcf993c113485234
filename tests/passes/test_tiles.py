"""What is wide between products runs some rows at a time wherever rows are made one by one, as exact as before."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.passes.composites import Composites
from memrewrite.passes.functionalize import Functionalize
from memrewrite.passes.fused_chains import FusedChains
from memrewrite.passes.tiles import Tiles
from memrewrite.records.errors import NotEquivalentError
from memrewrite.records.graph_calls import TiledCall
from memrewrite.runtime import tiles
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.tiles import in_tiles
from memrewrite.search import registry
from memrewrite.simulate.memory.tracker import Tracker
from tests.passes.helpers import (
    FRONT_ENDS,
    assert_as_good,
    assert_same_bits,
    functional,
    language_step,
    rewrite,
    rewrites,
    saved_storages,
)

NARROW, WIDE, ROWS, PIECE = 4, 24, 20, 8
Function = Callable[[Any, Tensor], Any]
PASS = Tiles(rows=PIECE)


class Wide(nn.Module):
    """``function(self, h)`` for ``h = first(x)``, with what an MLP is made of at hand."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first = nn.Linear(NARROW, NARROW)
        self.gate, self.up = nn.Linear(NARROW, WIDE), nn.Linear(NARROW, WIDE, bias=False)
        self.both, self.down = nn.Linear(NARROW, 2 * WIDE), nn.Linear(WIDE, NARROW)
        self.a, self.b = nn.Linear(WIDE, 2, bias=False), nn.Linear(2, NARROW, bias=False)
        self.norm, self.scale = nn.LayerNorm(WIDE), nn.Parameter(torch.rand(WIDE) + 0.5)
        self.conv_in, self.conv_out = nn.Parameter(torch.randn(NARROW, WIDE)), nn.Parameter(torch.randn(WIDE, NARROW))
        self.bias = nn.Parameter(torch.randn(WIDE))
        self.mix = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.first(x))


def example() -> Tensor:
    return torch.randn(ROWS // 5, 5, NARROW, generator=torch.Generator().manual_seed(1))


def lora(m: Any, h: Tensor) -> Tensor:
    """Two products read what is wide, one of them scaled."""
    wide = F.silu(m.gate(h)) * m.up(h)
    return m.down(wide) + m.b(m.a(wide * 0.5))


def conv1d(m: Any, h: Tensor) -> Tensor:
    """transformers' spelling of GPT-2's, on rows of their own dimension."""
    wide = torch.addmm(m.bias, h.view(-1, NARROW), m.conv_in).view(*h.shape[:-1], WIDE)
    wide = 0.5 * wide * (1 + torch.tanh(wide + 0.04 * wide.pow(3)))
    return torch.mm(wide.view(-1, WIDE), m.conv_out).view(h.shape)


def gated(m: Any, h: Tensor) -> Tensor:
    first, second = m.both(h).chunk(2, dim=-1)
    return m.down(first.sigmoid() * second)


SPELLINGS: dict[str, Function] = {
    "GELU": lambda m, h: h + m.down(F.gelu(m.gate(h))),
    "SwiGLU": lambda m, h: m.down(F.silu(m.gate(h)) * m.up(h)),
    "one product for both": gated,
    "split": lambda m, h: m.down(torch.mul(*m.both(h).split(WIDE, dim=2))),
    "Conv1D": conv1d,
    "LoRA": lora,
    "norm inside": lambda m, h: m.down(m.norm(m.gate(h).relu()) * m.scale),
    "dropout that is off": lambda m, h: m.down(F.dropout(m.gate(h).relu(), 0.0)),
    "two in a row": lambda m, h: m.down(m.gate(m.down(m.up(h).tanh())).tanh()),
}


def calls(graph_module: fx.GraphModule) -> list[TiledCall]:
    return [node.target for node in graph_module.graph.nodes if isinstance(node.target, TiledCall)]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS)
def test_runs_some_rows_at_a_time(function: Function, front_end: str) -> None:
    model, x = Wide(function), example()
    graph_module, result = functional(model, x, PASS, front_end)
    assert result.applied, result.refused
    assert f"{ROWS} rows runs {PIECE} of them at a time" in result.applied[0].what
    assert calls(graph_module)
    assert_as_good(graph_module, model, x)
    kept, before = (saved_storages(module, x, model) for module in (graph_module, model))
    assert max(kept) <= ROWS * NARROW < max(before)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_what_nobody_reads_is_left_alone(front_end: str) -> None:
    model, x = Wide(lambda m, h: [m.down(m.gate(h).tanh()), h][1]), example()
    graph_module, result = functional(model, x, PASS, front_end)
    assert not result.applied
    assert not result.refused
    assert_as_good(graph_module, model, x)


def test_each_is_as_good_as_the_other_in_halves_of_its_numbers() -> None:
    """In bfloat16, where the sum of pieces is rounded: no further off than twice the original."""
    model, x = Wide(SPELLINGS["SwiGLU"]).bfloat16(), example().bfloat16()
    graph_module, result = functional(model, x, PASS, "export")
    assert result.applied
    assert_as_good(graph_module, model, x)


REFUSED: dict[str, tuple[Function, str]] = {
    "read elsewhere": (lambda m, h: (m.down(w := m.gate(h).tanh()), w.sum()), ""),
    "its beginning is read elsewhere": (lambda m, h: (m.down((w := m.gate(h)).tanh() + 1), w.sum()), ""),
    "random": (lambda m, h: m.down(F.dropout(m.gate(h), 0.5).tanh()), ""),
    "across rows": (lambda m, h: m.down(m.gate(h).softmax(1).tanh()), ""),
    "in other places": (lambda m, h: m.down(m.gate(h).transpose(0, 1).tanh()), ""),
    "a norm of several rows": (lambda m, h: m.down(F.layer_norm(m.gate(h).tanh(), (5, WIDE))), ""),
    "read in another type": (
        lambda m, h: m.down(m.gate(h).tanh().view(torch.int32).bitwise_and(-2).view(torch.float32)),
        "",
    ),
    "mixed": (lambda m, h: m.down((m.mix(m.gate(h).transpose(1, 2)).transpose(1, 2)).tanh()), ""),
    "not wide": (lambda m, h: m.first(m.first(h).tanh()), ""),
    "written later": (
        lambda m, h: [m.down((m.gate(w := h * 2.0)).tanh() + m.up(w)), w.add_(1.0)][0],
        "writes one of its tensors later",
    ),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_stays(function: Function, reason: str) -> None:
    graph_module, result = rewrite(Wide(function), example(), [PASS])
    assert not result.applied
    assert not calls(graph_module)
    assert bool(reason) == bool(result.refused)
    assert reason in "".join(each.reason for each in result.refused)


def test_few_rows_stay() -> None:
    graph_module, result = functional(Wide(SPELLINGS["GELU"]), example(), Tiles(rows=ROWS), "export")
    assert not result.applied
    assert not result.refused
    assert not calls(graph_module)


def part(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def given(rows: int = ROWS, wide: int = WIDE, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, NARROW), (wide, NARROW), (wide, NARROW), (NARROW, wide))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def tiled(*tensors: Tensor) -> Tensor:
    result: Tensor = in_tiles(part, (0,), (1, 2, 3), PIECE, *tensors)
    return result


def test_gradients_of_gradients() -> None:
    tensors = given(dtype=torch.float64)
    assert torch.autograd.gradcheck(tiled, tensors)
    assert torch.autograd.gradgradcheck(tiled, tensors)


def test_of_several_results_any_may_be_left_out() -> None:
    x, gate, _, down = given()

    def both(x: Tensor, gate: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        wide = F.linear(x, gate)
        return F.linear(wide, down), F.linear(wide.tanh(), down)

    for i in range(2):
        ours, theirs = in_tiles(both, (0,), (1, 2), PIECE, x, gate, down), both(x, gate, down)
        for mine, other in zip(
            *(torch.autograd.grad(r[i].sum(), (x, gate, down)) for r in (ours, theirs)), strict=True
        ):
            torch.testing.assert_close(mine, other)


def test_backward_goes_again_where_the_graph_is_kept() -> None:
    tensors = given()
    loss = tiled(*tensors).square().sum()
    once, twice = (torch.autograd.grad(loss, tensors, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, twice))
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("frozen", [(), (1, 2, 3), (0,), (0, 1, 2, 3)], ids=["none", "weights", "rows", "all"])
def test_what_is_frozen_gets_nothing(frozen: tuple[int, ...]) -> None:
    ours, theirs = (
        [t.requires_grad_(i not in frozen) for i, t in enumerate(given(dtype=torch.float64))] for _ in range(2)
    )
    result = tiled(*ours)
    assert result.requires_grad == (len(frozen) < 4)
    if result.requires_grad:
        result.square().sum().backward()
        part(*theirs).square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_under_autocast_weights_are_cast_once_and_their_gradients_summed_as_they_are() -> None:
    """In float32, which the model's own sums are not further from float64 than."""
    tensors, exact = given(256), given(256, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = tiled(*tensors), part(*tensors)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    slope = torch.randn(256, NARROW)
    found = [torch.autograd.grad(r, tensors, slope.to(r.dtype)) for r in (ours, theirs)]
    right = torch.autograd.grad(part(*exact), exact, slope.to(torch.bfloat16).double())
    for mine, other, reference in zip(*found, right, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - reference).norm() <= 1.1 * (other - reference).norm()


def test_compiles_to_the_whole() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(tiled, backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(*given()), part(*given()))
    assert counter.frame_count == 1


@pytest.mark.parametrize("graded", [True, False])
def test_memory_is_that_of_some_rows(graded: bool) -> None:
    tensors = given(4096, 256)
    with torch.set_grad_enabled(graded), Tracker("cpu") as tracker:
        result = tiled(*tensors)
        if graded:
            result.backward(torch.ones_like(result))
    assert tracker.peak < 3 * tensors[0].nbytes + 2 * sum(t.nbytes for t in tensors[1:]) + 4096 * 256 * 4 / 8


class Mixer(nn.Module):
    """A language model with wide MLPs, which gives its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.gates, self.ups = (nn.ModuleList(nn.Linear(16, 256) for _ in range(2)) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(256, 16) for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(gate(x)) * up(x))
        return F.cross_entropy(self.head(x).view(-1, 30), labels.view(-1))


def planned(**options: Any) -> Any:
    torch.manual_seed(0)
    tokens = torch.randint(30, (64, 16))
    return memrewrite.optimize(Mixer(), tokens, example_kwargs={"labels": tokens}, optimizer="sgd", **options)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWEST, PASS.name, lambda _: Tiles(rows=64))


@pytest.fixture(scope="module")
def lowest() -> int:
    """The lowest peak without it."""
    found: int = planned(budget="min", exact=True, verify=False).report.predicted_after.peak
    return found


@pytest.fixture(scope="module")
def smallest() -> Any:
    """A model at its lowest peak."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.LOWEST, PASS.name, lambda _: Tiles(rows=64))
        return planned(budget="min", verify=False)


@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 0.7), ({"amp": "bf16"}, 0.5), ({"micro_batches": 2}, 0.5)],
    ids=["float32", "bf16", "batches"],
)
def test_a_budget_that_only_it_meets(options: dict[str, Any], share: float, lowest: int) -> None:
    report = planned(budget=int(share * lowest), **options).report
    assert PASS.name in rewrites(report)
    assert report.equivalent
    assert report.predicted_after.peak <= int(share * lowest)


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_inference_has_it_too(amp: str | None) -> None:
    model, tokens = Mixer().eval(), torch.randint(30, (64, 16))
    options: dict[str, Any] = {"example_kwargs": {"labels": tokens}, "amp": amp}
    result = memrewrite.optimize(model, tokens, budget="60%", **options)
    assert PASS.name in rewrites(result.report)
    assert memrewrite.verify(model, result, tokens, **options).equivalent
    assert memrewrite.measure(result, tokens, **options).peak == result.report.predicted_after.peak


def test_it_is_for_what_nothing_else_reaches(lowest: int) -> None:
    assert PASS.name not in rewrites(planned(budget=lowest, verify=False).report)
    with pytest.raises(memrewrite.BudgetInfeasibleError):
        planned(budget=int(0.7 * lowest), exact=True)


def test_a_segment_that_ends_with_it_runs_no_product_for_nothing(smallest: Any) -> None:
    """Those of the parts run once more, for their gradients, and maybe that of the head."""
    assert PASS.name in rewrites(smallest.report)
    assert smallest.report.segments
    tokens = torch.zeros(64, 16, dtype=torch.int64)
    flops = []
    for model in (Mixer(), smallest):
        with FlopCounterMode(display=False) as counter:
            model(tokens, labels=tokens).backward()
        flops.append(counter.get_total_flops())
    product = 2 * tokens.numel() * 16
    assert 0 <= flops[1] - flops[0] - 2 * 3 * 256 * product <= 30 * product


def test_a_wrong_sum_of_gradients_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if half of the pieces had been left out."""

    def last(self: Any, *args: Any) -> Any:
        found = slopes(self, *args)
        return [each if i in self.in_rows or each is None else each / 2 for i, each in enumerate(found)]

    slopes = tiles._Tiles.slopes
    monkeypatch.setattr(tiles._Tiles, "slopes", last)
    with pytest.raises(NotEquivalentError):
        planned(budget="min")


def test_artifact_and_copies_have_it(smallest: Any, tmp_path: Path) -> None:
    save(smallest, tmp_path / "out")
    torch.manual_seed(0)
    tokens = torch.randint(30, (64, 16))
    arrived = memrewrite.load(tmp_path / "out", Mixer())
    arrived.load_state_dict(smallest.state_dict())
    for other in (arrived, copy.deepcopy(smallest), pickle.loads(pickle.dumps(smallest))):
        assert "in_tiles(" in programs(smallest)[""].source
        assert_same_bits(language_step(smallest, tokens), language_step(other, tokens))


def one_of_two_results(m: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    """The other one is read as a whole."""
    wide = F.silu(m.gate(h)) * m.up(h)
    return m.down(wide), (wide * 0.5).sum(0)


@pytest.mark.parametrize("function", [lora, one_of_two_results], ids=lambda each: each.__name__)
def test_of_a_chain_with_several_results(function: Function) -> None:
    model, x = Wide(function), example()
    graph_module, result = rewrite(model, x, [Functionalize(), FusedChains(), PASS])
    assert len(result.applied) == (function is lora)
    assert_as_good(graph_module, model, x)


@pytest.mark.parametrize("first", [FusedChains(), Composites()], ids=lambda each: each.name)
def test_after_other_passes(first: Any) -> None:
    """What these have made of activations is a part's as well, and is written once for all."""
    model, x = Wide(SPELLINGS["SwiGLU"]), example()
    graph_module, result = rewrite(model, x, [Functionalize(), first, PASS])
    assert result.applied
    assert_as_good(graph_module, model, x)
