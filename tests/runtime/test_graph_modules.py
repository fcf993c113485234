"""Models that are an ``fx.GraphModule``, as torchvision's feature extractors are: they compile their forward again."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memrewrite
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import FallbackWarning

WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        hidden = self.layers(x)
        return {"features": [hidden, hidden * 2]}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = fx.symbolic_trace(Net()), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x)["features"][1])
        return result


def made() -> tuple[fx.GraphModule, Any, Tensor]:
    torch.manual_seed(0)
    plain, x = fx.symbolic_trace(Net()), torch.randn(8, WIDTH)
    planned = memrewrite.optimize(copy.deepcopy(plain), x, budget="min")
    assert programs(planned)
    return plain, planned, x


def assert_alike(plain: nn.Module, planned: nn.Module, x: Tensor) -> None:
    results = plain(x), planned(x)
    assert [type(each["features"]) for each in results] == [list, list]
    assert all(map(torch.equal, *(each["features"] for each in results)))


def test_it_returns_what_it_did() -> None:
    assert_alike(*made())


def test_what_is_compiled_again_runs_the_program() -> None:
    plain, planned, x = made()
    planned.recompile()
    assert_alike(plain, planned, x)  # without a warning
    assert programs(planned)


def change(*models: Any) -> None:
    for model in models:
        model.graph = changed = copy.deepcopy(model.graph)
        scaled = next(node for node in changed.nodes if 2 in node.args)
        scaled.args = (scaled.args[0], 3)
        model.recompile()


def test_another_graph_runs_as_it_is() -> None:
    plain, planned, x = made()
    before = planned.graph
    change(plain, planned)
    with pytest.warns(FallbackWarning, match="its graph was changed"):
        assert_alike(plain, planned, x)
    planned.graph = before
    assert_alike(fx.GraphModule(plain, before), planned, x)


def test_copies_run_the_program() -> None:
    plain, planned, x = made()
    copied = copy.deepcopy(planned)
    assert programs(copied)
    assert_alike(plain, copied, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_of_another_graph_stay_as_they_are(copied: Any) -> None:
    plain, planned, x = made()
    change(plain, planned)
    again = copied(planned)
    again.recompile()
    with pytest.warns(FallbackWarning, match="its graph was changed"):
        assert_alike(plain, again, x)


def test_what_is_pickled_runs_the_program() -> None:
    plain, planned, x = made()
    again = pickle.loads(pickle.dumps(planned))
    assert programs(again)
    again.recompile()
    assert_alike(plain, again, x)  # without a warning
    assert_alike(plain, pickle.loads(pickle.dumps(again)), x)


def test_one_inside_may_be_compiled_again() -> None:
    plain, x = Outer(), torch.randn(8, WIDTH)
    planned = memrewrite.optimize(copy.deepcopy(plain), x, budget="min")
    body: Any = planned.body
    body.recompile()  # as those of torchvision do where the mode is switched
    assert torch.equal(plain(x), planned(x))  # without a warning
