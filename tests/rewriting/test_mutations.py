"""Each legality test is there for a reason: without it, a model exists whose rewrite does not pass verification.

Every row takes one test away and optimizes a model that needs it. Either ``optimize`` refuses the result, or its step
fails, or training it differs from training the original. With the test in place the same model passes.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memrewrite.passes import checkpoint_segments, composites, functionalize, inplace_activation, swish
from memrewrite.plan.marks import NodeMark
from memrewrite.plan_facts import chain as facts
from memrewrite.records.errors import MemrewriteError
from memrewrite.runtime import dropin
from memrewrite.runtime.operations import AROUND_NODES
from memrewrite.runtime.segment import run_segment
from memrewrite.workload.step import Inputs
from tests.fuzz.check import EXACT, Ask, check

Forward = Callable[["Body", Tensor], Tensor]


class Body(nn.Module):
    """Two linear layers around a function of what the first gives."""

    steps: Tensor

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(2))
        self.register_buffer("steps", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


def written_alias(body: Body, h: Tensor) -> Tensor:
    h = h * 1.5
    view = h[:, :16]
    h.mul_(2)
    return torch.cat([view, h[:, 16:] + 1], 1)


def swish_of_changed_input(body: Body, h: Tensor) -> Tensor:
    x = h.detach() * 1.5
    gate = torch.sigmoid(x)
    x[:, :8].add_(1)
    return h + x * gate


def gelu_of_changed_input(body: Body, h: Tensor) -> Tensor:
    x = h.detach() * 1.5
    gate = torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    x[:, :8].add_(1)
    return h + 0.5 * x * (1 + gate)


def skip_connection(body: Body, h: Tensor) -> Tensor:
    h = h * 1.5
    return F.relu(h) + h


def counted(body: Body, h: Tensor) -> Tensor:
    """Reads a buffer that a later operation writes, so it cannot run again."""
    for _ in range(3):
        h = torch.tanh(h * 1.1 + body.steps)
        h = torch.tanh(h * 1.1)
        h = torch.tanh(h * 1.1)
    body.steps.add_(0.5)
    return h


def written_between(body: Body, h: Tensor) -> Tensor:
    """Reads an activation before and after it is written, so reading and writing belong in one segment."""
    table = torch.zeros_like(h)
    for column in range(4):
        h = torch.tanh(torch.tanh(h + table * 0.5) * 1.1)
        table[:, column].copy_(h[:, column].detach() + 1)
    return h


def normalised(body: Body, h: Tensor) -> Tensor:
    for norm in body.norms:
        h = torch.tanh(norm(torch.tanh(h * 1.1)) * 1.1)
    return h


def dropped(body: Body, h: Tensor) -> Tensor:
    for _ in range(3):
        h = torch.tanh(F.dropout(torch.tanh(h * 1.1), 0.4) * 1.1)
    return h


def drawn_again(segment: Any, module: Any, *live_ins: Any, random: bool, **keywords: Any) -> Any:
    return run_segment(segment, module, *live_ins, random=False, **keywords)


def counted_again(mark: NodeMark, **changes: Any) -> NodeMark:
    return replace(mark, **changes | {"skipped": False})


def updated_again(buffer: Tensor, recomputing: bool) -> Tensor:
    return buffer


@dataclass(frozen=True)
class Row:
    """One legality test: where it is looked up, what takes its place, and a model that needs it."""

    owners: tuple[Any, ...]
    name: str
    instead: Any
    forward: Forward
    ask: Ask


def nothing_wrong(*arguments: Any) -> None:
    return None


def everywhere(effects: Any, nodes: list[Any]) -> Any:
    return np.full(len(nodes), len(nodes), dtype=np.int64)


def nothing_fixed(effects: Any, nodes: list[Any]) -> list[bool]:
    return [False] * len(nodes)


PATTERN = Ask(share=None)
TIGHT = Ask(share="min", passes=("checkpoint_segments",))
ROWS = {
    "functionalize.check": Row((functionalize,), "check", nothing_wrong, written_alias, Ask(None, EXACT)),
    "swish.check": Row((swish,), "check", nothing_wrong, swish_of_changed_input, PATTERN),
    "composites.check": Row((composites,), "check", nothing_wrong, gelu_of_changed_input, PATTERN),
    "inplace_activation.check": Row((inplace_activation,), "check", nothing_wrong, skip_connection, Ask(None, EXACT)),
    "barrier": Row((facts, checkpoint_segments), "barrier", everywhere, written_between, TIGHT),
    "barrier of what persists": Row((facts,), "_never", nothing_fixed, counted, TIGHT),
    "counters": Row((checkpoint_segments,), "replace", counted_again, normalised, TIGHT),
    "once": Row((AROUND_NODES,), "once", updated_again, normalised, TIGHT),
    "preserve_rng": Row((AROUND_NODES,), "run_segment", drawn_again, dropped, TIGHT),
}


@contextlib.contextmanager
def taken_away(row: Row) -> Iterator[None]:
    """The legality test replaced wherever it is looked up; programs already compiled are forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropin, "_PROGRAMS", {})
        for owner in row.owners:
            (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, row.name, row.instead)
        yield


def train(row: Row) -> str:
    torch.manual_seed(0)
    return check(Body(row.forward), Inputs((torch.randn(64, 32),), {}), row.ask)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_with_its_legality_test_the_model_passes(row: Row) -> None:
    assert train(row) in ("exact", "close")


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_without_its_legality_test_the_model_is_caught(row: Row) -> None:
    with taken_away(row), pytest.raises((MemrewriteError, AssertionError, RuntimeError)):
        train(row)
