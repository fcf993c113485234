"""Operations between products become one wherever that is the same function, keeps no more and moves less."""

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.capture import capture
from memrewrite.codegen.writer import generate
from memrewrite.observe.effects import observe
from memrewrite.passes.fused_chains import FusedChains
from memrewrite.passes.linear_cross_entropy import LinearCrossEntropy
from memrewrite.records.graph_calls import ChainCall
from memrewrite.runtime import fused as runtime
from memrewrite.runtime.dropin import build, program_from, programs
from memrewrite.runtime.fused import fused
from memrewrite.runtime.kernels import Given, Kernel
from memrewrite.search import registry
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.workload.step import Inputs
from tests.passes.helpers import (
    FRONT_ENDS,
    WIDTH,
    Around,
    assert_as_good,
    assert_same_bits,
    example,
    functional,
    numbers,
    saved_storages,
    targets,
)

Function = Callable[[Any, Tensor], Any]
ROWS = 5


def rms_norm(m: Any, h: Tensor) -> Tensor:
    """transformers' spelling."""
    wide = h.to(torch.float32)
    return m.betas * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def rotated(h: Tensor) -> Tensor:
    first, second = h[..., : WIDTH // 2], h[..., WIDTH // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotary(m: Any, h: Tensor) -> Tensor:
    angles = torch.arange(WIDTH, dtype=torch.float32)
    return h * angles.cos() + rotated(h) * angles.sin()


def after_a_sum(m: Any, h: Tensor) -> Tensor:
    """The sum is kept and not its two parts."""
    total = h + m.linear(h)
    return total + rms_norm(m, total)


SPELLINGS: dict[str, Function] = {
    "RMSNorm": rms_norm,
    "rotary": rotary,
    "gate": lambda m, h: F.silu(m.linear(h)) * m.linear(h * 2.0),
    "GELU gate": lambda m, h: F.gelu(m.linear(h)) * h * m.betas,
    "soft cap": lambda m, h: 3.0 * torch.tanh(h / 3.0) + 1.0,
    "sum and norm": after_a_sum,
    "layer norm by hand": lambda m, h: (
        (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 1e-5).sqrt() * m.beta
    ),
    "several results": lambda m, h: (torch.exp(-h * h), torch.exp(-h * h).neg().mul(m.beta)),
    "views inside": lambda m, h: (h.exp().view(-1, 2, 3).transpose(1, 2) * 2.0).sigmoid(),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS)
def test_becomes_one(function: Function, front_end: str) -> None:
    model, x = Around(function), example(ROWS)
    graph_module, result = functional(model, x, FusedChains(), front_end)
    assert result.applied, result.refused
    assert any(name.startswith("chain_") for name in targets(graph_module))
    assert_as_good(graph_module, model, x)
    assert sum(saved_storages(graph_module, x, model)) <= sum(saved_storages(model, x, model))


def test_saves_its_input_alone() -> None:
    graph_module, _ = functional(model := Around(rms_norm), x := example(ROWS), FusedChains(), "export")
    assert saved_storages(graph_module, x, model) == [ROWS * WIDTH]
    assert len(saved_storages(model, x, model)) > 2


def test_what_backward_does_not_read_is_not_kept() -> None:
    """The gradient of a rotary embedding needs the angles alone."""
    graph_module, _ = functional(Around(rotary), example(ROWS), FusedChains(), "export")
    (call,) = (node.target for node in graph_module.graph.nodes if isinstance(node.target, ChainCall))
    assert (call.trained, call.keeps) == ((0,), (1, 2))


REFUSED: dict[str, Function] = {
    "random": lambda m, h: F.dropout(h, 0.5) * 2.0,
    "one operation": lambda m, h: h.exp(),
    "a view": lambda m, h: h.view(-1).unsqueeze(0).transpose(0, 1),
    "products": lambda m, h: m.linear(h) @ h.t(),
    "another way through a product": lambda m, h: h.exp() * m.linear(h.exp()),
    "another way without a gradient": lambda m, h: (e := m.betas.exp()) * (e.detach() @ torch.ones(WIDTH, WIDTH)),
    "across rows": lambda m, h: h.sum(0) * h.mean(),
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_stays(function: Function) -> None:
    graph_module, result = functional(Around(function), example(ROWS), FusedChains(), "export")
    assert not result.applied
    assert not any(name.startswith("chain_") for name in targets(graph_module))


def test_what_is_written_later_is_not_kept() -> None:
    """It reads another value then."""

    def counted(m: Any, h: Tensor) -> Tensor:
        scaled = (h + m.scale) * m.scale.exp() * 2.0
        m.scale.add_(1.0)
        return scaled

    _, result = functional(Around(counted), example(ROWS), FusedChains(), "export")
    assert not result.applied
    assert "writes one of its tensors" in result.refused[0].reason


def test_equal_chains_are_one_function() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Around(rms_norm) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Stack(), example(ROWS)
    captured = capture(model, Inputs((x,), {}))
    FusedChains()(captured.graph_module, observe(captured.graph_module, [x]))
    source, constants = generate(replace(captured, graph_module=captured.graph_module))
    assert source.count("def chain_") == 1
    assert source.count("fused(chain_") == 3
    result = build(model, program_from(source), constants)
    assert_as_good(result, model, x)


def test_a_weight_that_is_trained_later_has_its_gradient() -> None:
    model = Around(lambda m, h: F.silu(h) * m.betas * 2.0)
    model.betas.requires_grad_(False)
    x = example(ROWS)
    captured = capture(model, Inputs((x,), {}))
    FusedChains()(captured.graph_module, observe(captured.graph_module, [x]))
    result: Any = build(model, program_from(generate(captured)[0]), {})
    model.betas.requires_grad_(True)
    gradients = [torch.autograd.grad(each(x).sum(), model.betas)[0] for each in (result, model)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("keeps", [(), (0,)], ids=["not kept", "kept"])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode], ids=["real", "fake"])
def test_gradients_lie_as_what_they_are_of(mode: Any, keeps: tuple[int, ...]) -> None:
    """So that none is copied where that is a view of a product's result."""

    def chain_twice(x: Tensor) -> Tensor:
        return x * 2.0 + x.expand(x.shape)

    with mode():
        product = torch.ones(3, ROWS, 2 * WIDTH, requires_grad=True)
        heads = product.view(3, ROWS, 2, WIDTH).transpose(1, 2)
        loss = (fused(chain_twice, (0,), keeps, heads) * torch.ones(3, 2, ROWS, WIDTH)).sum()
        (gradient,) = torch.autograd.grad(loss, heads)
        assert gradient.stride() == heads.stride()
        assert gradient.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode], ids=["real", "fake"])
def test_models_written_earlier_ask_for_gradients_without_orders(mode: Any) -> None:
    def chain_thrice(x: Tensor) -> Tensor:
        return x * 3.0

    with mode():
        x = torch.ones(2, 5).t()
        fused(chain_thrice, (), (), x)
        (gradient,) = torch.ops.memrewrite.chain_slopes("chain_thrice", [x], [torch.ones(5, 2)], [True])
        assert gradient.shape == x.shape
        assert gradient.is_contiguous()


def test_differentiates_twice() -> None:
    model, x = Around(rms_norm), example(ROWS)
    graph_module, _ = functional(model, x, FusedChains(), "export")

    def second(module: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        result = module(leaf)
        only = result[0] if isinstance(result, tuple) else result
        (first,) = torch.autograd.grad(only.square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    torch.testing.assert_close(second(graph_module), second(model))


def test_under_autocast() -> None:
    model, x = Around(lambda m, h: m.linear(rms_norm(m, h) * 2.0)), example(ROWS)
    graph_module, _ = functional(model, x, FusedChains(), "export")
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_good(graph_module, model, x)


class Cubic(nn.Module):
    """Of which autocast of CUDA computes the power in float32, and with it all that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def test_casts_as_autocast_does() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, 64), Cubic(), nn.Linear(64, WIDTH)), torch.randn(256, WIDTH)
    options: dict[str, Any] = {"device": "cuda", "amp": "bf16", "optimizer": "sgd", "verify": False}
    result = memrewrite.optimize(model, x, budget="min", passes="all", **options)
    (program,) = programs(result).values()
    chain = program.source.partition("def chain_")[2].partition("return")[0]
    cast = re.search(r"(\w+) = aten.to.dtype\(x0, torch.float32\)", chain)
    assert cast is not None
    assert f"aten.pow.Tensor_Scalar({cast[1]}, 3.0)" in chain
    assert chain.count("aten.to.dtype") == 1


def test_a_soft_cap_is_left_to_the_loss() -> None:
    """Which makes it of some rows at a time."""

    def capped(m: Any, h: Tensor) -> Tensor:
        logits = 3.0 * torch.tanh(m.linear(h) / 3.0)
        return F.cross_entropy(logits, torch.arange(h.shape[0]) % WIDTH)

    graph_module, result = functional(Around(capped), example(20), FusedChains(), "export")
    assert not result.applied
    after = LinearCrossEntropy(elements=2 * WIDTH)(graph_module, observe(graph_module, [example(20)]))
    assert after.applied


class Gated(nn.Module):
    """A norm and a gate, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.up, self.gate, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        h = self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@pytest.fixture(scope="module")
def planned() -> Any:
    """A plan for CUDA, which computes chains on the CPU as they are."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Gated() for _ in range(3))), torch.randn(256, WIDTH)
    options: dict[str, Any] = {"device": "cuda", "optimizer": "sgd", "budget": "min"}
    return memrewrite.optimize(model, x, passes="all", **options), x


def test_plans_have_it(planned: Any) -> None:
    result, _ = planned
    report = result.report
    assert FusedChains.name in {name for name, _, _ in report.rewrites}
    assert report.equivalent
    assert report.predicted_after.peak < report.predicted_before.peak
    (program,) = programs(result).values()
    uses = program.source.count("fused(chain_")
    assert uses == 5  # three gates and two norms: nothing that the first one is given is trained
    assert program.source.count("def chain_") < uses


def test_artifact_and_copies_have_it(planned: Any, tmp_path: Path) -> None:
    result, x = planned
    save(result, tmp_path / "out")
    model = nn.Sequential(*(Gated() for _ in range(3)))
    model.load_state_dict(result.state_dict())
    loaded = memrewrite.load(tmp_path / "out", model)
    for other in (loaded, copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert_same_bits(numbers(other, x, other), numbers(result, x, result))


def test_a_compiled_model_is_fused_as_a_whole(planned: Any) -> None:
    result, x = planned
    torch.compiler.reset()
    compiled: Any = torch.compile(result, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), result(x))


def test_nothing_is_compiled_where_that_is_asked_for(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In no thread, as on CUDA backward has one of its own."""
    result, x = planned
    expected, calls = numbers(result, x, result), list[Kernel]()

    def call(kernel: Kernel, given: Given) -> list[Tensor]:
        calls.append(kernel)
        return kernel.plain(given)

    monkeypatch.setattr(runtime, "_compiles", lambda tensor: True)
    monkeypatch.setattr(Kernel, "__call__", call)
    with runtime.uncompiled() as spared, ThreadPoolExecutor(1) as pool:
        assert not spared
        assert_same_bits(pool.submit(numbers, result, x, result).result(), expected)
    assert not calls
    assert spared == {name for name in runtime.CHAINS if f"def {name}(" in programs(result)[""].source}
    assert_same_bits(numbers(result, x, result), expected)
    assert calls


def test_is_for_cuda_and_on_request() -> None:
    names = ("fused_chains",)
    assert any(isinstance(each, FusedChains) for each in registry.patterns(names, False, True))
    for asked, exact, for_cuda in ((None, False, True), (names, True, True), (names, False, False)):
        assert not any(isinstance(each, FusedChains) for each in registry.patterns(asked, exact, for_cuda))
