"""Plans for a result that will be compiled: what ``torch.compile`` honours, and how it runs that."""

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import register_pytree_node

import memrewrite
from memrewrite.records.errors import BudgetInfeasibleError
from tests.benchmarks.models import WORKLOADS
from tests.observe.test_kept import Block
from tests.support.compiled import compiled_bytes
from tests.support.dropins import assert_same_bits, loss_of, segmented, step
from tests.support.models import ResidualNet


@dataclass(frozen=True)
class Case:
    """A model, its input and a budget."""

    build: Callable[[], nn.Module]
    x: Tensor
    budget: str


NESTED, KEPT = "segments in segments", "nodes kept"
CASES = {
    NESTED: Case(lambda: ResidualNet(4, 8), torch.randn(8, 3, 16, 16), "min"),
    KEPT: Case(lambda: nn.Sequential(*(Block(16, 0.0) for _ in range(4))), torch.randn(2, 128, 16), "65%"),
}
PRODUCTS = ("aten.addmm.default", "aten.mm.default", "aten.convolution.default", "aten.bmm.default")


@functools.cache
def optimized(name: str, compiled: bool, budget: int | None = None) -> Any:
    """The model of ``CASES``, seeded, within its budget or another one."""
    case = CASES[name]
    torch.manual_seed(0)
    limit = case.budget if budget is None else budget
    return memrewrite.optimize(case.build(), case.x, budget=limit, optimizer="sgd", verify=False, compiled=compiled)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_for_the_compiler_divides_only_segments_that_keep_nodes(name: str) -> None:
    planned, usual = optimized(name, compiled=True), optimized(name, compiled=False)
    assert (planned.report.config["compiled"], usual.report.config["compiled"]) == (True, False)
    outer = re.findall(r"^def segment_(\d+)\(", planned._memrewrite.source, re.M)
    divided = {number for number, _ in re.findall(r"^def segment_(\d+)_(\d+)\(", planned._memrewrite.source, re.M)}
    keeping = {number for number in outer if re.search(kept_in(number), planned._memrewrite.source, re.M | re.S)}
    assert outer
    assert divided <= keeping
    assert name == NESTED or keeping


def kept_in(number: str) -> str:
    """A pattern for a kept node in an outermost segment or in a part of it."""
    return rf"^def segment_{number}(_\d+)?\([^\n]*\n((?!def )[^\n]*\n)*?[^\n]*keep\(recomputing"


@pytest.mark.parametrize("name", CASES)
def test_compiled_it_computes_the_same(name: str) -> None:
    assert_same_compiled(optimized(name, compiled=True), CASES[name].x)


def assert_same_compiled(result: Any, x: Tensor) -> None:
    """Compiled, a step of ``result`` computes what it does uncompiled."""
    torch.compiler.reset()
    compiled: Any = torch.compile(result, backend="aot_eager", fullgraph=True)
    found, expected = step(result, x, lambda module, x: compiled(x)), step(result, x)
    torch.compiler.reset()
    del found["random"], expected["random"]
    torch.testing.assert_close(found, expected)


def beyond_plan(result: Any, x: Tensor) -> float:
    """The peak as compiled as a share of the planned one, parameters, buffers and inputs aside."""
    outside = sum(tensor.nbytes for tensor in [x, *result.parameters(), *result.buffers()])
    found = compiled_bytes(result, lambda module: loss_of(module(x)))
    return found.peak / (result.report.predicted_after.peak - outside)


def test_compiled_it_holds_what_was_planned_and_segments_in_segments_do_not() -> None:
    planned, usual = optimized(NESTED, compiled=True), optimized(NESTED, compiled=False)
    assert usual.report.predicted_after.peak < planned.report.predicted_after.peak
    assert beyond_plan(planned, CASES[NESTED].x) <= 1.02 < beyond_plan(usual, CASES[NESTED].x)


def test_compiled_it_holds_what_was_planned_across_skip_connections() -> None:
    torch.manual_seed(0)
    model, x = WORKLOADS["unet"].build(True), torch.randn(4, 3, 64, 64)
    result = memrewrite.optimize(model, x, budget="min", optimizer="none", verify=False, compiled=True)
    assert beyond_plan(result, x) <= 1.02


class Chain(nn.Module):
    """Blocks that end with a view, which AOTAutograd would not keep for being told to."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = down(torch.tanh(up(x)))
        return x


def test_compiled_segments_that_give_views_run_again_one_by_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16, 32)
    result: Any = memrewrite.optimize(Chain(), x, budget="min", optimizer="none", verify=False, compiled=True)
    assert len(result.report.segments) > 4
    assert beyond_plan(result, x) <= 1.02


class Dense(nn.Module):
    """Every layer reads what all before it gave, side by side."""

    def __init__(self, depth: int = 6, growth: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [functional.pad(x, (0, 0, 0, 0, 0, 8 - x.shape[1]))]
        for conv in self.convs:
            features.append(torch.tanh(conv(torch.cat(features, 1))))
        return torch.cat(features, 1)


@pytest.mark.parametrize(
    "case", [Case(Dense, torch.randn(4, 3, 16, 16), "min"), *CASES.values()], ids=["dense", *CASES]
)
def test_compiled_backward_comes_to_a_segment_once_its_gradients_are_there(case: Case) -> None:
    torch.manual_seed(0)
    result: Any = memrewrite.optimize(
        case.build(), case.x, budget=case.budget, optimizer="none", verify=False, compiled=True
    )
    source = result._memrewrite.source
    outermost = source.count("= run_segment(") - source.count("within=recomputing")
    settled = re.findall(r"\((.*), \) = settled\((.*)\)", source)
    assert outermost > 1
    assert outermost - 1 <= len(settled) <= outermost  # nothing that is only returned
    assert all(read == written for read, written in settled)
    often = Counter(name for read, _ in settled for name in read.split(", "))
    assert (max(often.values()) > 1) == (case.build is Dense)
    backward = compiled_bytes(result, lambda module: loss_of(module(case.x))).backward
    assert backward["auto_functionalized_v2"] == len(settled)


def test_a_budget_that_only_segments_in_segments_reach() -> None:
    low = optimized(NESTED, compiled=False).report.predicted_after.peak
    said = (
        r"No plan for torch\.compile fits .*: the lowest reachable peak is .*; uncompiled, or by "
        r'torch\.compile\(\.\.\., backend="memrewrite"\), it may be lower\. What else'
    )
    with pytest.raises(BudgetInfeasibleError, match=said) as caught:
        optimized(NESTED, compiled=True, budget=low)
    assert caught.value.lowest == optimized(NESTED, compiled=True).report.predicted_after.peak > low
    assert caught.value.options


class Wide(nn.Module):
    """Residual branches whose products are dear and narrow, or wide."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + torch.sigmoid(down(functional.gelu(up(norm(x)))))
        return x


@pytest.mark.parametrize(
    ("budget", "amp"),
    [("45%", torch.bfloat16), ("60%", None), ("75%", torch.bfloat16)],
    ids=["45%-bfloat16 autocast", "60%-float32", "75%-bfloat16 autocast"],
)
def test_what_is_kept_does_not_run_again_and_nothing_else_is_held(budget: str, amp: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(64, 16, 32)
    outside = sum(tensor.nbytes for tensor in [x, *model.parameters()])
    original = memrewrite.estimate(model, x, optimizer="none", amp=amp).peak.bytes - outside
    limit = outside + original * int(budget.rstrip("%")) // 100
    result: Any = memrewrite.optimize(model, x, budget=limit, optimizer="none", amp=amp, verify=False, compiled=True)

    def loss(module: nn.Module) -> Tensor:
        with torch.autocast("cpu", amp, enabled=amp is not None):
            return loss_of(module(x))

    plain, found = compiled_bytes(model, loss), compiled_bytes(result, loss)
    source = result._memrewrite.source
    kept, products = source.count("keep(recomputing"), source.count("aten.linear.default")
    again = sum(found.backward[name] - plain.backward[name] for name in PRODUCTS)
    assert kept > 0
    assert again <= products - kept
    assert found.kept < limit - outside
    assert found.kept <= 0.8 * plain.kept


def test_compiled_the_lowest_plan_is_through_with_a_value_before_its_gradient_is_read() -> None:
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(64, 16, 32)
    lowest, roomy = (
        memrewrite.optimize(model, x, budget=budget, optimizer="none", compiled=True) for budget in ("min", "90%")
    )
    assert "in_turn(" not in cast(Any, roomy)._memrewrite.source
    source = cast(Any, lowest)._memrewrite.source
    narrowing = re.findall(r"aten\.linear\.default\(\*in_turn\(\w+, ([\w.]+)\)", source)
    assert len(narrowing) == len(model.downs)  # not the products that widen
    assert all("downs" in weight for weight in narrowing)
    backward = compiled_bytes(lowest, lambda module: loss_of(module(x))).backward
    assert backward["auto_functionalized_v2"] == source.count("= settled(") + len(narrowing)
    assert_same_compiled(lowest, x)


class Dropped(nn.Module):
    """Branches that are dropped for whole samples, as timm does it."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            kept = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.8).div_(0.8)
            x = x + torch.tanh(layer(x)) * kept
        return x


def test_compiled_few_random_numbers_stay() -> None:
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(8, 64, 64)
    result: Any = memrewrite.optimize(model, x, budget="min", optimizer="none", compiled=True)
    assert result.report.segments
    assert result.report.verdict.startswith("bit-equal")
    assert "draw(" in result._memrewrite.source
    found = compiled_bytes(result, lambda module: loss_of(module(x)))
    assert not [name for name in found.backward if "rng" in name or name.startswith("aten.bernoulli")]
    assert found.backward["aten.tanh.default"] > 0


class Normalized(nn.Module):
    """Batch normalizations with what may follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norms[0](self.convs[0](x)))
        y = functional.leaky_relu_(self.norms[1](self.convs[1](x)), 0.1)
        return torch.relu(self.norms[2](self.convs[2](y)) + x)


@pytest.mark.parametrize("statistics", [False, True])
def test_compiled_statistics_are_found_once_where_they_are_kept(statistics: bool) -> None:
    torch.manual_seed(0)
    model, x = Normalized(), torch.randn(4, 3, 16, 16)
    result = segmented(model, x, size=100, statistics=statistics).module
    found = compiled_bytes(result, lambda module: loss_of(module(x)))
    assert found.backward["aten.var_mean.correction"] == (0 if statistics else 3)
    assert found.backward["aten.convolution.default"] >= 2
    taken, expected = (
        step(module, x, torch.compile(type(module).__call__, backend="aot_eager_decomp_partition", fullgraph=True))
        for module in (result, model)
    )
    assert_same_bits(taken, expected)


class Scores(dict[str, Tensor]):
    """What a model may return: a class that PyTorch is told how to take apart."""


register_pytree_node(
    Scores,
    lambda scores: (list(scores.values()), list(scores)),
    lambda values, names: Scores(zip(names, values, strict=True)),
    serialized_type_name="tests.runtime.test_compiled.Scores",
)


class Scored(nn.Module):
    """A residual net that returns its scores and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResidualNet(4, 8)

    def forward(self, x: Tensor) -> Scores:
        scores = self.net(x)
        return Scores(scores=scores, mean=scores.mean())


def test_a_model_that_returns_a_class_of_its_own_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    model, x = Scored(), torch.randn(8, 3, 16, 16)
    result: Any = memrewrite.optimize(model, x, budget="min", optimizer="none", verify=False, compiled=True)
    assert result.report.segments
    torch.compiler.reset()
    compiled: Any = torch.compile(result, backend="aot_eager", fullgraph=True)
    found = compiled(x)
    torch.compiler.reset()
    expected = model(x)
    assert type(found) is Scores
    torch.testing.assert_close(dict(found), dict(expected))


@dataclass
class Settings:
    """As those of transformers' models: it says itself when two are equal."""

    slope: float = 0.5


class Asking(nn.Module):
    """A model with settings and a function of PyTorch's as its own, which looks at autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings, self.gate = nn.Linear(8, 8), Settings(), torch.sigmoid

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        found = found.float() if torch.is_autocast_enabled("cpu") else found
        return found * self.gate(found) * self.settings.slope


def test_what_a_compiled_result_looks_at_can_be_traced() -> None:
    model, x = Asking(), torch.randn(8, 8)
    result: Any = memrewrite.optimize(model, x, optimizer="none", verify=False, compiled=True)
    assert "settings" in result._memrewrite.source
    assert "self.gate == then" in result._memrewrite.source  # Dynamo of 2.11 traces no id of a function of PyTorch's
    torch.compiler.reset()
    compiled: Any = torch.compile(result, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    result.gate = model.gate = torch.tanh
    compiled = torch.compile(result, backend="eager")
    with pytest.warns(memrewrite.FallbackWarning, match="has changed"):
        found = compiled(x)
    torch.compiler.reset()
    torch.testing.assert_close(found, model(x))


def changed(model: Any, x: Tensor) -> Tensor:
    model[1] = nn.Tanh()
    found: Tensor = model(x)
    return found


def of_other_sizes(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x.view(4, 4, 16))
    return found


def by_gradients(model: Any, x: Tensor) -> Tensor:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    slopes = torch.func.grad(lambda w: loss_of(torch.func.functional_call(model, w, (x,))))(weights)
    return torch.cat([slope.flatten() for slope in slopes.values()])


UNFIT: dict[Callable[[Any, Tensor], Tensor], str] = {
    changed: "what it was captured with has changed",
    of_other_sizes: "an input is torch.float32 of 3 dimensions on cpu, captured as torch.float32",
    by_gradients: "within a transform of torch.func",
}


@pytest.mark.parametrize("call", UNFIT, ids=lambda call: call.__name__)
def test_calls_that_run_the_original_forward_compile_as_one_graph(call: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16), nn.Sigmoid()), torch.randn(16, 16)
    result: Any = memrewrite.optimize(copy.deepcopy(model), x, budget="min", verify=False, exact=True)
    torch.compiler.reset()
    compiled: Any = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    with pytest.warns(memrewrite.FallbackWarning, match=UNFIT[call]):
        found = compiled(result, x)
    torch.compiler.reset()
    assert torch.equal(found, call(model, x))


class Drawing(nn.Module):
    """Dropout and batch normalization in segments: what must be the same, or be done once, where one runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = functional.dropout(functional.gelu(norm(layer(x))), 0.3, self.training)
        return x


@pytest.mark.parametrize("backend", ["eager", "eager_noexcept", "aot_eager"])
def test_what_draws_and_updates_by_every_back_end(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Drawing(), torch.randn(256, 16)
    result: Any = memrewrite.optimize(copy.deepcopy(model), x, budget="min", verify=False, exact=True)
    assert "random=True" in result._memrewrite.source
    torch.compiler.reset()
    compiled: Any = torch.compile(result, backend=backend)
    for _ in range(2):
        assert_same_bits(step(result, x, lambda _, leaf: compiled(leaf)), step(model, x))
    torch.compiler.reset()
