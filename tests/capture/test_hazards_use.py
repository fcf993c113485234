"""What callers do with a result: each use gives the numbers of the original, or a sentence that says why not."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

import memrewrite
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.workload.step import Inputs
from tests.support.dropins import loss_of
from tests.support.steps import assert_right, assert_same, taken


class Smooth(nn.Module):
    """Linear layers with dropout and activations that have every derivative; nothing in it updates a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = torch.tanh(self.dropout(torch.sigmoid(h) * 2) * 1.5)
        return x


def smooth(dropout: float = 0.0) -> Smooth:
    torch.manual_seed(0)
    return Smooth(dropout)


def rows(k: int = 0, n: int = 64) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(k))


def both(model: nn.Module, x: Tensor, **options: Any) -> tuple[Any, Any]:
    """What ``optimize`` gives for a copy at the lowest budget, and the original."""
    result = memrewrite.optimize(copy.deepcopy(model), x, budget="min", verify=False, **options)
    assert result.report.segments
    return result, model


def gradient_penalty(module: nn.Module, x: Tensor) -> list[Tensor]:
    (slope,) = torch.autograd.grad(loss_of(module(x)), x, create_graph=True)
    ((slope.norm() - 1) ** 2 + module(x).mean()).backward()
    return [slope.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def hessian_vector_product(module: nn.Module, x: Tensor) -> list[Tensor]:
    weights = list(module.parameters())
    slopes = torch.autograd.grad(loss_of(module(x)), weights, create_graph=True)
    return list(torch.autograd.grad(torch.stack([s.square().sum() for s in slopes]).sum(), weights))


def hessian(module: nn.Module, x: Tensor) -> list[Tensor]:
    found: Any = torch.autograd.functional.hessian(lambda x: loss_of(module(x)), x.detach()[:3])
    return [found]


def forward_mode(module: nn.Module, x: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(module(forward_ad.make_dual(x.detach(), torch.ones_like(x))))
    assert output.tangent is not None
    return [output.primal, output.tangent]


def jvp(module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.func.jvp(module, (x.detach(),), (torch.ones_like(x),)))


def vmapped(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [torch.func.vmap(module)(x.detach().view(4, -1, 8))]


def func_grad(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [torch.func.grad(lambda x: loss_of(module(x)))(x.detach())]


def jacobian(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [torch.func.jacrev(lambda x: module(x).sum(0))(x.detach())]


def per_sample_gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return loss_of(functional_call(module, weights, (row[None],)))

    return list(torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x.detach()).values())


def gradients_of_a_call(module: nn.Module, x: Tensor) -> list[Tensor]:
    given = {name: (p.detach() * 1.1).requires_grad_() for name, p in module.named_parameters()}
    return list(torch.autograd.grad(loss_of(functional_call(module, given, (x,))), list(given.values())))


USES: dict[str, tuple[Callable[[nn.Module, Tensor], list[Tensor]], str]] = {
    "gradient penalty": (gradient_penalty, ""),
    "Hessian-vector product": (hessian_vector_product, ""),
    "Hessian": (hessian, ""),
    "forward mode": (forward_mode, "it is called within forward-mode differentiation"),
    "torch.func.jvp": (jvp, "it is called within a transform of torch.func"),
    "torch.func.vmap": (vmapped, "it is called within a transform of torch.func"),
    "torch.func.grad": (func_grad, "it is called within a transform of torch.func"),
    "torch.func.jacrev": (jacobian, "it is called within a transform of torch.func"),
    "per-sample gradients": (per_sample_gradients, "its parameters are replaced for this call"),
    "functional_call": (gradients_of_a_call, "its parameters are replaced for this call"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("use", USES)
def test_derivatives_of_every_kind(use: str) -> None:
    function, said = USES[use]
    result, model = both(smooth(), rows())
    expected = function(model, rows().requires_grad_())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", FallbackWarning)
        found = function(result, rows().requires_grad_())
    told = [str(w.message) for w in seen if w.category is FallbackWarning]
    assert len(told) == bool(said)
    assert all(said in text for text in told)
    assert_same({str(i): t for i, t in enumerate(found)}, {str(i): t for i, t in enumerate(expected)})


class Cache:
    """What a model keeps from one call to the next, for its caller."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Caching(Smooth):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = super().forward(x)
        if cache is not None:
            cache.kept.append(x.detach())
        return x


def test_what_a_call_is_given_to_write_is_written_by_that_call_alone() -> None:
    torch.manual_seed(0)
    result, model = both(Caching(), rows())
    cache, expected = Cache(), Cache()
    with pytest.warns(FallbackWarning, match="it was captured for a call with x"):
        result(rows(), cache)
    model(rows(), expected)
    assert [type(tensor) for tensor in cache.kept] == [Tensor]
    assert torch.equal(cache.kept[0], expected.kept[0])


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_result_is_the_original_graph(strict: bool) -> None:
    result, model = both(smooth(), rows())
    exported = torch.export.export(result, (rows(),), strict=strict)
    names = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert names == [
        node.target
        for node in torch.export.export(model, (rows(),), strict=strict).graph.nodes
        if node.op == "call_function"
    ]
    assert torch.equal(exported.module()(rows(1)), model(rows(1)))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_traced_result_is_the_original_graph_also_in_training() -> None:
    """A trace records what runs once: no segments, which run again in backward, and no sizes that are compared."""
    result, model = both(smooth(), rows())
    traces = [torch.jit.trace(module.train(), (rows(),)) for module in (result, model)]
    ours, theirs = (str(trace.inlined_graph).count("aten::") for trace in traces)
    assert ours == theirs
    assert_same(*(of(trace) for trace in traces))


def hooked(module: nn.Module) -> list[Tensor]:
    """What a hook for all modules, as one that looks for NaN, is called with."""
    seen: list[Tensor] = []
    handle = register_module_forward_hook(lambda m, args, out: seen.append(out.detach()))
    try:
        loss_of(module(rows())).backward()
    finally:
        handle.remove()
    return seen


def test_hooks_for_all_modules_see_all_of_them() -> None:
    result, model = both(smooth(), rows())
    with pytest.warns(FallbackWarning, match="hooks for all modules are registered"):
        ours = hooked(result)
    assert [torch.equal(a, b) for a, b in zip(ours, hooked(model), strict=True)] == [True] * 5


def test_counters_of_flops_count_what_runs() -> None:
    """Which have hooks for all modules, too, and are asked for what runs again."""
    counts = []
    for module in both(smooth(), rows()):
        with FlopCounterMode(display=False) as counter:
            loss_of(module(rows())).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] > counts[1]


def last_batch_smaller(k: int) -> Inputs:
    return Inputs((rows(k, 64 if k < 2 else 7),), {})


def one_row_last(k: int) -> Inputs:
    return Inputs((rows(k, 64 if k < 2 else 1),), {})


def test_a_last_smaller_batch() -> None:
    assert_right(smooth(0.2), last_batch_smaller)
    result, model = both(smooth(0.2), rows())
    with pytest.warns(FallbackWarning, match=r"an input is torch\.float32 \(1, 8\) on cpu, captured as"):
        ours = taken(result, one_row_last)
    assert_same(ours, taken(model, one_row_last))


def of(module: nn.Module) -> dict[str, Any]:
    """Three steps on full batches."""
    return taken(module, lambda k: Inputs((rows(k),), {}))


def averaged(module: nn.Module) -> dict[str, Any]:
    """Three steps, each followed by an update of the exponential moving average, which then takes steps of its own."""
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    record = of(module)
    average.update_parameters(module)
    record |= {f"average {name}": value for name, value in average.module.state_dict().items()}
    return record | {f"then {k}": v for k, v in of(average).items()}


def copied(module: nn.Module) -> dict[str, Any]:
    twin = copy.deepcopy(module)
    record = of(twin)
    return record | {f"itself {k}": v for k, v in of(module).items()}


def pickled(module: nn.Module) -> dict[str, Any]:
    return of(pickle.loads(pickle.dumps(module)))


def accumulated(module: nn.Module) -> dict[str, Any]:
    """Four micro-batches per step, under autocast, through a GradScaler."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for k in range(2):
        for part in rows(k).split(16):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(loss_of(module(part)) / 4)
            scaler.scale(losses[-1]).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = {"losses": torch.stack(losses).detach(), "norm": norm, "scale": torch.tensor(scaler.get_scale())}
    return {**state, **module.state_dict(), "random": torch.get_rng_state()}


@pytest.mark.parametrize("way", [averaged, copied, pickled, accumulated], ids=lambda way: way.__name__)
def test_ways_of_training(way: Callable[[nn.Module], dict[str, Any]]) -> None:
    result, model = both(smooth(0.2), rows())
    ours, theirs = way(result), way(model)
    assert_same(ours, theirs)


def test_an_input_written_between_forward_and_backward_raises_as_it_does_in_the_original() -> None:
    for module in both(smooth(), rows()):
        x = rows()
        output = module(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was written in place"):
            loss_of(output).backward()


def noted(seen: list[str], what: str, value: Tensor) -> Tensor:
    seen.append(what)
    return value


def on_the_model(module: Any, seen: list[str]) -> None:
    module.register_forward_hook(lambda m, a, out: noted(seen, "forward", out * 2))
    module.register_full_backward_hook(lambda m, a, out: seen.append("backward"))


def on_tensors(module: Any, seen: list[str]) -> None:
    module.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: g * 3) and None)
    module.layers[1].weight.register_hook(lambda g: noted(seen, "weight", g * 2))


@pytest.mark.parametrize("register", [on_the_model, on_tensors], ids=lambda f: f.__name__)
def test_hooks_of_the_callers(register: Callable[[Any, list[str]], None]) -> None:
    """On the model itself, on its output and on its parameters, which are outside of what is rewritten."""
    records = []
    for module in both(smooth(0.2), rows()):
        seen: list[str] = []
        register(module, seen)
        records.append({**of(module), "seen": seen})
        assert seen
    assert_same(*records)
