"""Functions of ``torch.compile`` and TorchScript in a forward, which a program runs as they are written."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from tests.support.dropins import assert_same_bits, step

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@torch.compile(backend="eager")
def doubled(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


@torch.compiler.disable  # type: ignore[untyped-decorator]
def left_out(x: Tensor) -> Tensor:
    return x * 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)


class ByName(Layers):
    def act(self, x: Tensor) -> Tensor:
        return doubled(x)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(left_out(self.act(self.first(x))))
        return result


class ByAttribute(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.squashed: Any = torch.compile(torch.tanh, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.squashed(self.first(x)))
        return result


@pytest.mark.parametrize(("kind", "name"), [(ByName, "doubled"), (ByAttribute, "squashed")])
def test_the_report_says_that_it_runs_as_it_is_written(kind: type[nn.Module], name: str) -> None:
    model, x = kind(), torch.randn(64, 32)
    result = memrewrite.optimize(copy.deepcopy(model), x, budget="min")
    assert [note for note in result.report.notes if note.startswith(f"What torch.compile made of {name} runs as it is")]
    assert_same_bits(step(result, x), step(model, x))


def test_nothing_is_said_of_a_model_without_any() -> None:
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    result = memrewrite.optimize(model, torch.randn(64, 32), budget="min")
    assert not any("torch.compile" in note for note in result.report.notes)


def softclamp(x: Tensor, value: float) -> Tensor:
    return (x / value).tanh() * value


class Scripted(Layers):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(softclamp(self.first(x), 5.0))
        return result


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_gradients_go_through_functions_of_torchscript(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, script = Scripted(), torch.randn(64, 32), cast(Any, torch.jit.script)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "softclamp", script(softclamp))
        result = memrewrite.optimize(model, x, budget="min")
        found = step(result, x)
    assert "What torch.jit.script made of softclamp runs as it is" in " ".join(result.report.notes)
    assert_same_bits(found, step(model, x))
