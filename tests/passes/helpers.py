"""What the tests of passes share: a model around one function, and the numbers and saved bytes of a run."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from memrewrite.capture import capture
from memrewrite.observe.effects import observe
from memrewrite.passes.functionalize import Functionalize
from memrewrite.rewriting.contract import Pass, Result
from memrewrite.workload.step import Inputs

FRONT_ENDS = ("export", "dynamo")
WIDTH = 6


class Around(nn.Module):
    """``function(self, h)`` for ``h = linear(x)``, with a learnable and a constant beta at hand."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.beta = nn.Parameter(torch.tensor(1.3))
        self.betas = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("scale", torch.tensor(1.5))
        self.relu, self.sigmoid = nn.ReLU(inplace=True), nn.Sigmoid()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def example(rows: int = 5) -> Tensor:
    """Inputs whose images spread over both signs."""
    return 3 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def rewrite(
    model: nn.Module, x: Tensor, passes: list[Pass], front_end: str = "export"
) -> tuple[fx.GraphModule, Result]:
    """Capture ``model`` and apply ``passes``; returns the graph and what the last pass did.

    Holds every pass to its word: ``modified`` iff the code changed, and a second application changes nothing.
    """
    torch.compiler.reset()
    graph_module = capture(model, Inputs((x,), {}), front_end).graph_module
    result = Result()
    for graph_pass in passes:
        before = graph_module.code
        result = graph_pass(graph_module, observe(graph_module, [x]))
        after = graph_module.code
        assert result.modified == (before != after)
        again = graph_pass(graph_module, observe(graph_module, [x]))
        assert not again.modified
        assert graph_module.code == after
    return graph_module, result


def functional(model: nn.Module, x: Tensor, graph_pass: Pass, front_end: str) -> tuple[fx.GraphModule, Result]:
    """``rewrite`` with functionalization before ``graph_pass``, as the driver runs it."""
    return rewrite(model, x, [Functionalize(), graph_pass], front_end)


def targets(graph_module: fx.GraphModule) -> list[str]:
    """What the graph calls, in order."""
    called = [node.target for node in graph_module.graph.nodes if node.op.startswith("call")]
    return [target if isinstance(target, str) else getattr(target, "__name__", str(target)) for target in called]


def numbers(module: nn.Module, x: Tensor, owner: nn.Module) -> dict[str, Tensor]:
    """Outputs, gradients of the input and of ``owner``'s parameters, and buffers after one seeded run."""
    leaf = x.detach().clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(2)
    flat = module(leaf)
    outputs = list(flat) if isinstance(flat, tuple | list) else [flat]
    loss = torch.stack([(o * torch.linspace(0.5, 2, o.numel()).view_as(o)).double().sum() for o in outputs]).sum()
    named = {n: t for n, t in (("x", leaf), *owner.named_parameters()) if t.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    record = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    record |= {f"gradient {n}": g for n, g in zip(named, gradients, strict=True) if g is not None}
    return record | {f"buffer {n}": b.clone() for n, b in owner.named_buffers()}


def saved_storages(module: nn.Module, x: Tensor, owner: nn.Module) -> list[int]:
    """Elements in each distinct storage autograd keeps in a run, parameters and buffers of ``owner`` aside."""
    known = {t.untyped_storage().data_ptr() for t in (*owner.parameters(), *owner.buffers(), x)}
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in known:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes() // saved.element_size()
        return saved.detach()

    with saved_tensors_hooks(pack, lambda saved: saved):
        outputs = module(x)
    del outputs
    return sorted(kept.values())


def language_step(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients of a model that is called with tokens and gives its loss alone."""
    model.zero_grad()
    loss = model(tokens, labels=tokens)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def rewrites(report: Any) -> set[str]:
    """The names of the passes that changed something."""
    return {name for name, _, _ in report.rewrites}


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Every number is the same, bit for bit (nan equals nan)."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")


def assert_as_good(
    graph_module: nn.Module, model: nn.Module, x: Tensor, factor: float = 2.0, owner: nn.Module | None = None
) -> None:
    """The errors against float64 are no larger than ``factor`` times the original's own, plus a float32 whisker.

    ``owner`` is the model whose parameters the graph uses when that is not ``model`` itself.
    """
    ours, theirs = numbers(graph_module, x, owner or model), numbers(model, x, model)
    exact_model = copy.deepcopy(model).double()
    exact = numbers(exact_model, x.double(), exact_model)
    assert ours.keys() == theirs.keys() == exact.keys()
    for name, reference in exact.items():
        mine, original = (_rmse(record[name], reference) for record in (ours, theirs))
        scale = float(reference.square().mean().sqrt()) if reference.numel() else 0.0
        assert mine <= factor * original + 1e-7 * (1 + scale), f"{name}: {mine} against {original}"


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance between two float32 tensors, counted in representable numbers."""
    ordered = [t.detach().view(torch.int32).long() for t in (a, b)]
    first, second = (torch.where(t < 0, -(t & 0x7FFFFFFF), t) for t in ordered)
    return int((first - second).abs().max())


def _rmse(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).square().mean().sqrt()) if reference.numel() else 0.0
