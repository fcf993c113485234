"""A module with tiny layers at hand for whatever forward a test gives, its inputs, and segments over its graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.capture import Captured
from memrewrite.capture.normal import leaf_tensors
from memrewrite.observe.effects import observe
from memrewrite.passes.checkpoint_segments import CheckpointSegments
from memrewrite.plan.marks import Marks
from memrewrite.plan.segments import Plan
from memrewrite.plan_facts.chain import compute_nodes
from memrewrite.workload.step import Inputs

WIDTH = 6
Prepare = Callable[[Any], Any]


class Layers(nn.Module):
    """A few layers at hand for a forward that a test gives."""

    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.norm = nn.Conv2d(3, WIDTH, 3, bias=False), nn.BatchNorm2d(WIDTH)
        self.dropout, self.relu = nn.Dropout(0.3), nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("counter", torch.zeros(()))


def nameless(name: str) -> Any:
    """A straight-through estimator that no module has under a name of its own, so that no program can call it."""

    class Nameless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < 1)

    Nameless.__name__ = name
    return Nameless


def model(function: Callable[..., Any], prepare: Prepare = lambda m: None) -> Any:
    """``Layers`` with ``function`` as forward, after ``prepare`` has seen it; the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = type("Model", (Layers,), {"forward": function})()
        prepare(made)
    return made


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(3))


def images() -> Tensor:
    return x(2, 3, 8, 8)


def mark(module: nn.Module, inputs: Inputs, captured: Captured, first: str, last: str) -> Marks:
    """The marks that make the nodes from ``first`` to ``last`` (prefixes of names) a segment."""
    effects = observe(captured.graph_module, leaf_tensors(module, inputs))
    names = [node.name for node in compute_nodes(effects)]
    a, b = (next(i for i, name in enumerate(names) if name.startswith(n)) for n in (first, last))
    return CheckpointSegments(Plan(((a, b + 1),)))(effects)[0]
