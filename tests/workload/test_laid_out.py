"""Sparse and nested tensors, of which nothing tells what they hold before they are there."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import CaptureError, UsageError
from tests.support.dropins import assert_same_bits, step

pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        self.after = copy.deepcopy(self.before)

    def spread(self, adjacency: Tensor, x: Tensor) -> Tensor:
        result: Tensor = self.after(torch.sparse.mm(adjacency, self.before(x)))
        return result


class Buffered(Layers):
    def __init__(self, compressed: bool = False) -> None:
        super().__init__()
        adjacency = torch.eye(64)
        self.register_buffer("adjacency", adjacency.to_sparse_csr() if compressed else adjacency.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        adjacency: Any = self.adjacency
        return self.spread(adjacency, x)


class Given(Layers):
    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.spread(adjacency, x)


class Summed(nn.Module):
    def forward(self, x: Any) -> Tensor:
        result: Tensor = x.values().sum(0)
        return result


class Spread(nn.Module):
    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, x)


class Made(Layers):
    """Makes it of the edges that it is given, and hands it to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Spread()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (64, 64))
        result: Tensor = self.after(self.layer(adjacency, self.before(x)))
        return result


class Pieces(nn.Module):
    def __init__(self, each: nn.Module) -> None:
        super().__init__()
        self.each = each

    def forward(self, nested: Any) -> Tensor:
        return torch.stack([self.each(piece).sum(0) for piece in nested.unbind()])


class Nests(Layers):
    """Hands a nested tensor to a layer, one that has the layout of ordinary tensors."""

    def __init__(self, each: nn.Module) -> None:
        super().__init__()
        self.layer = Pieces(each)

    def forward(self, x: Tensor) -> Tensor:
        nested: Any = torch.nested.as_nested_tensor([*self.before(x).split(32)], layout=torch.strided)
        result: Tensor = self.after(self.layer(nested))
        return result


class Bent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Padded(Layers):
    """Makes a nested tensor by an operator that has no rule for fake ones; a layer gives another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Bent()

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        nested: Any = self.layer(torch.nested.nested_tensor([y[:30], y[30:]]))
        result: Tensor = self.after(y).sum() + torch.nested.to_padded_tensor(nested, 0.0).sum()
        return result


class Jagged(Layers):
    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        nested: Any = torch.nested.nested_tensor_from_jagged(x, offsets)
        result: Tensor = self.after(self.before(nested)).values()
        return result


def rows() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def edges() -> Tensor:
    return torch.arange(64).repeat(2, 1)


GIVEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], str]] = {
    "a buffer": (
        Buffered,
        lambda: (rows(),),
        r"adjacency is a sparse tensor \(torch\.sparse_coo\).*set model\.adjacency = model\.adjacency\.to_dense\(\)",
    ),
    "a compressed one": (
        lambda: Buffered(True),
        lambda: (rows(),),
        r"adjacency is a sparse tensor \(torch\.sparse_csr",
    ),
    "an input": (Given, lambda: (rows(), torch.eye(64).to_sparse()), r"An input is a sparse tensor"),
    "a nested one": (
        lambda: nn.Sequential(nn.Linear(32, 32), Summed()),
        lambda: (torch.nested.nested_tensor([rows(), rows()], layout=torch.jagged),),
        "An input is a nested tensor",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_is_refused_as_what_it_is_and_measured(name: str) -> None:
    make, inputs, words = GIVEN[name]
    with pytest.raises(UsageError, match=words):
        memrewrite.optimize(make(), inputs(), budget="min")
    with pytest.raises(UsageError, match=words):
        memrewrite.estimate(make(), inputs())
    assert memrewrite.measure(make(), inputs()).peak > 0


def test_what_is_around_one_that_forward_makes_is_rewritten() -> None:
    model, inputs = Made(), (rows(), edges())
    result = memrewrite.optimize(copy.deepcopy(model), inputs, budget="min", exact=True)
    assert memrewrite.estimate(model, inputs).peak.bytes == memrewrite.measure(model, inputs).peak
    before, after = result.report.predicted_before, result.report.predicted_after
    assert before is not None
    assert after is not None
    assert after.peak < before.peak
    call: Any = lambda module, x: module(x, edges())  # noqa: E731
    assert_same_bits(step(result, rows(), call), step(model, rows(), call))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("each", [nn.Linear(32, 32), nn.Tanh()], ids=["with parameters", "without"])
def test_what_is_around_a_nested_one_that_forward_makes_is_rewritten(each: nn.Module) -> None:
    model = Nests(each)
    result = memrewrite.optimize(copy.deepcopy(model), rows(), budget="min", exact=True)
    assert any("layer is left alone: it is called with a sparse or a nested" in note for note in result.report.notes)
    assert_same_bits(step(result, rows()), step(model, rows()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_layer_without_parameters_may_be_given_one_and_give_another() -> None:
    model = Padded()
    result = memrewrite.optimize(copy.deepcopy(model), rows(), budget="min", exact=True)
    assert any("_nested_tensor_from_tensor_list" in note for note in result.report.notes)
    assert_same_bits(step(result, rows()), step(model, rows()))


def test_a_model_that_is_nested_throughout_is_told_of() -> None:
    inputs = rows(), torch.tensor([0, 30, 64])
    with pytest.raises(CaptureError, match="Jagged computes with a sparse or a nested tensor"):
        memrewrite.optimize(Jagged(), inputs, budget="min")
    assert memrewrite.estimate(Jagged(), inputs).peak.bytes == memrewrite.measure(Jagged(), inputs).peak
