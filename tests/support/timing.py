"""What the tests of node costs and of step times share: a net, its effects, and measures that measure nothing."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn

from memrewrite.capture import capture
from memrewrite.capture.normal import leaf_tensors
from memrewrite.costs import Times
from memrewrite.costs.calls import Call
from memrewrite.costs.timer import Measure
from memrewrite.observe.effects import Effects, observe
from memrewrite.plan_facts.chain import compute_nodes
from memrewrite.workload.step import Inputs

TIMES = Times(2.0, 5.0, 0.1, 0.2)


class Net(nn.Module):
    """Products of three signatures, and activations that keep their input and their output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(layer(x)).relu()
        return self.head(x.flatten(1))


def observed(model: nn.Module, x: Tensor, front_end: str = "export", amp: torch.dtype | None = None) -> Effects:
    captured = capture(model, Inputs((x,), {}), front_end)
    return observe(captured.graph_module, leaf_tensors(model, Inputs((x,), {})), amp)


def opened(measure: Measure) -> Callable[[], AbstractContextManager[Measure]]:
    return lambda: contextlib.nullcontext(measure)


class Recorded:
    """Measures nothing; every call takes ``times``, but those whose text holds ``untimed``."""

    def __init__(self, times: Times | None = TIMES, untimed: str = "nowhere") -> None:
        self.calls: list[str] = []
        self._times, self._untimed = times, untimed

    def __call__(self, call: Call) -> Times | None:
        self.calls.append(call.text)
        return None if self._untimed in call.text else self._times


def node_named(effects: Effects, part: str, number: int = 0) -> fx.Node:
    return [node for node in compute_nodes(effects) if part in str(node.target)][number]
