"""Average pools keep nothing of what they are given: backward reads its sizes alone."""

import uuid
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.backends import entry
from memrewrite.backends.partition import Partition
from memrewrite.records.compiled import CompiledGraph

POOLS = {2: functional.avg_pool2d, 3: functional.avg_pool3d}


class Pooled(nn.Module):
    """A product whose result is pooled, which nothing else reads."""

    def __init__(self, dims: int, window: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dims, self.window = dims, window
        self.inner, self.outer = nn.Linear(8, 12), nn.Linear(12 // window, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(POOLS[self.dims](self.inner(x), self.window)).tanh()


def steps(model: nn.Module, module: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Results and gradients: matrices are multiplied in another order where a graph is divided."""
    found = []
    for x in inputs:
        model.zero_grad()
        result = module(x)
        result.square().sum().backward()
        found += [result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found


def compared(model: nn.Module, inputs: list[Tensor], **how: Any) -> CompiledGraph:
    """What is told of a model that was compiled, and computes what it did before."""
    model, inputs = model.double(), [x.double() for x in inputs]
    plain = steps(model, model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=entry.memrewrite, options={"budget": "100%", "optimizer": "none"}, **how)
    for ours, expected in zip(steps(model, compiled, inputs), plain, strict=True):
        torch.testing.assert_close(ours, expected)
    (graph,) = memrewrite.report_of(compiled).graphs
    return graph


def pooled(dims: int) -> tuple[Tensor, int]:
    """An input, and the bytes of what is pooled."""
    x = torch.randn(2, *[12] * dims, 8)
    return x, 8 * 2 * 12**dims * 12


@pytest.mark.parametrize(("dims", "window", "kept"), [(2, 2, False), (3, 2, False), (2, 6, True)])
def test_what_is_pooled_is_not_kept(dims: int, window: int, kept: bool, partitions: list[Partition]) -> None:
    """But for a window so large that Inductor calls PyTorch's own kernel."""
    x, size = pooled(dims)
    graph = compared(Pooled(dims, window), [x])
    assert graph.kept is not None
    assert graph.kept == graph.kept_before
    assert (graph.kept >= size) == kept


def test_sizes_that_vary_are_left_to_the_tensor(partitions: list[Partition]) -> None:
    compared(Pooled(2, 2), [torch.randn(size, 12, 12, 8) for size in (2, 4, 6)], dynamic=True)
    assert len(partitions) == 1


@pytest.mark.parametrize("dims", POOLS)
def test_kernels_read_sizes_alone(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "identity", lambda partition: str(uuid.uuid4()))  # nothing comes from caches
    x, size = pooled(dims)
    graph = compared(Pooled(dims, 2), [x])
    assert graph.kept is not None
    assert graph.kept < size
