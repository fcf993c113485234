"""A hazard in one submodule: it stays opaque, its neighbours are rewritten, every number is that of the original.

What runs around it is one plan, with regions in it where what is inside can be captured.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memrewrite
from memrewrite.passes.linear_cross_entropy import LinearCrossEntropy
from memrewrite.runtime.dropin import programs
from memrewrite.search import registry
from memrewrite.workload.step import Inputs
from tests.search.test_regions import Sign, Stage
from tests.support.steps import assert_same, taken


class Odd(nn.Module):
    """A submodule that does what no graph can hold, around a child of its own."""

    count: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.calls = function, 0
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Tanh())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Net(nn.Module):
    """An odd submodule between two stages."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.odd, self.last = Stage(), Odd(function), Stage()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.odd(self.first(x)))
        return result


def custom_function(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * Sign.apply(x)


def tensor_hook(self: Any, x: Tensor) -> Tensor:
    hidden = self.inner(x)
    hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


def layer_drop(self: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else self.inner(x)  # noqa: S311  (any draw)


def numpy_random(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * float(np.random.rand())


def step_counter(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.inner(x) / self.calls


def buffer_reassigned(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return self.inner(x) / self.count


def branch_on_values(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) if float(x.mean()) > 0 else x


def own_checkpoint(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.inner, x, use_reentrant=False)


def seeded(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return self.inner(x) + torch.rand_like(x)


def gradients(self: Any, x: Tensor) -> Tensor:
    hidden = self.inner(x)
    (slope,) = torch.autograd.grad(hidden.square().sum(), hidden, retain_graph=True)
    return hidden + slope


FUNCTIONS = [
    custom_function,
    tensor_hook,
    layer_drop,
    numpy_random,
    step_counter,
    buffer_reassigned,
    branch_on_values,
    own_checkpoint,
    seeded,
    gradients,
]


def hooked(net: Net, seen: list[Any]) -> Net:
    net.odd.inner[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    return net


def three_steps(net: nn.Module) -> dict[str, Any]:
    random.seed(4)
    np.random.seed(4)
    shape = (8, 8, 12, 12)
    record = taken(net, lambda k: Inputs((torch.randn(shape, generator=torch.Generator().manual_seed(k)),), {}))
    return {**record, "python": random.getstate(), "numpy": str(np.random.get_state(legacy=False))}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_odd_submodule_stays_opaque(function: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    random.seed(0)  # so that a layer that may be dropped is not at first
    net = Net(function).train()
    result = memrewrite.optimize(copy.deepcopy(net), torch.randn(8, 8, 12, 12), budget="75%", verify=False)
    unseen = function is gradients  # what it keeps until then is not there to see, so nothing is planned around it
    assert set(programs(result)) - {"odd.inner"} == ({"first", "last"} if unseen else {""})
    assert result.report.segments
    told = "is not captured whole:" if unseen else "(Odd) stays a call that the model makes:"
    assert any(note.startswith(f"odd {told} Odd ") for note in result.report.notes)
    assert_same(three_steps(result), three_steps(net))


def test_a_hook_on_a_layer_keeps_firing_in_one_plan_for_all_else() -> None:
    torch.manual_seed(0)
    plain = Net(lambda self, x: self.inner(x)).train()
    seen: tuple[list[Any], list[Any]] = ([], [])
    nets = [hooked(Net(lambda self, x: self.inner(x)).train(), each) for each in seen]
    for net in nets:
        net.load_state_dict(plain.state_dict())
    result = memrewrite.optimize(nets[0], torch.randn(8, 8, 12, 12), budget="75%", verify=False)
    assert list(programs(result)) == [""]
    told = "odd.inner.1 (BatchNorm2d) stays a call that the model makes: it has forward hooks."
    assert told in result.report.notes
    seen[0].clear()
    assert_same(three_steps(result), three_steps(nets[1]))
    assert seen[0] == seen[1] != []


def noting(seen: list[Any]) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, before, after: seen.append(float(after[0].sum()))


class Shared(nn.Module):
    """Runs one stage before and after a block that has a hook and its own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.odd = Stage(), Odd(lambda odd, x: checkpoint(odd.inner[0], x, use_reentrant=False))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.stage(self.odd(self.stage(x)).tanh())
        return result


def test_a_block_with_a_hook_stays_a_call_where_what_is_around_it_can_be_no_regions() -> None:
    torch.manual_seed(0)
    plain = Shared().train()
    seen: tuple[list[Any], list[Any]] = ([], [])
    nets = [copy.deepcopy(plain) for _ in seen]
    for net, each in zip(nets, seen, strict=True):
        net.odd.register_full_backward_hook(noting(each))
    result = memrewrite.optimize(nets[0], torch.randn(8, 8, 12, 12), budget="75%", verify=False)
    assert list(programs(result)) == [""]
    assert result.report.segments
    assert "odd (Odd) stays a call that the model makes: it has backward hooks." in result.report.notes
    seen[0].clear()
    assert_same(three_steps(result), three_steps(nets[1]))
    assert seen[0] == seen[1] != []


class Body(nn.Module):
    """Layers of which each may be dropped, as transformers' LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) > 0:  # which can be 0
                x = x + layer(x)
        return x


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(16, 4096, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), labels)


def test_what_runs_around_a_branch_is_planned_with_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWER, LinearCrossEntropy.name, lambda *_: LinearCrossEntropy(elements=2**12))
    torch.manual_seed(0)
    x, labels = torch.randn(256, 16), torch.randint(4096, (256,))
    result = memrewrite.optimize(Words(), (x, labels), budget="min")
    assert list(programs(result)) == ["", "body.layers.0", "body.layers.1"]
    assert "linear_cross_entropy" in {rewrite[0] for rewrite in result.report.rewrites}
    before, after = result.report.predicted_before.peak, result.report.predicted_after.peak
    assert after < before - x.shape[0] * 4096 * 4
