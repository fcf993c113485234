"""The old ``weight_norm`` and ``spectral_norm`` are hooks: such a layer stays a call, and what to use is told."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import memrewrite
from memrewrite.records.errors import CaptureError
from memrewrite.simulate import run_tracked
from memrewrite.workload.step import Inputs, Step
from tests.support.steps import assert_same, taken

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {"weight_norm": weight_norm, "spectral_norm": spectral_norm}
X = torch.ones(256, 8)


class Net(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
        self.head = norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden * torch.sigmoid(hidden))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("budget", [None, "min"])
def test_a_normed_model_itself_is_refused(name: str, budget: str | None) -> None:
    sentence = rf"Linear \(Linear\) has torch\.nn\.utils\.{name}, a hook that sets weight before each call"
    with pytest.raises(CaptureError, match=sentence):
        memrewrite.optimize(NORMS[name](nn.Linear(8, 8)), X, budget=budget)


@pytest.mark.parametrize("name", NORMS)
def test_a_normed_submodule_is_named(name: str) -> None:
    sentence = rf"0 \(Linear\) has torch\.nn\.utils\.{name}, .* use torch\.nn\.utils\.parametrizations\.{name}"
    model = nn.Sequential(NORMS[name](nn.Linear(8, 8)), nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 8))
    optimized = memrewrite.optimize(model, X, budget="min")
    assert any(re.search(sentence, note) for note in optimized.report.notes)
    assert optimized.report.equivalent


@pytest.mark.parametrize("name", NORMS)
def test_what_lies_beside_it_is_rewritten(name: str) -> None:
    model = Net(NORMS[name])
    optimized = memrewrite.optimize(model, X, budget="min")
    assert memrewrite.report_of(optimized).changed
    assert any(f"head (Linear) has torch.nn.utils.{name}" in note for note in optimized.report.notes)
    optimized(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", NORMS)
def test_the_new_ones_are_captured(name: str) -> None:
    model = Net(getattr(parametrizations, name)).eval()
    optimized = memrewrite.optimize(model, X, budget="min")
    assert memrewrite.report_of(optimized).changed
    with torch.no_grad():
        torch.testing.assert_close(optimized(X), model(X))


def test_a_layer_with_weight_norm_runs_again_in_backward() -> None:
    """The hook makes the same weight again, as it does in each call."""
    torch.manual_seed(0)
    layers = (layer for _ in range(5) for layer in (weight_norm(nn.Linear(16, 16)), nn.Sigmoid(), nn.Tanh()))
    model, x = nn.Sequential(*layers), torch.randn(512, 16)
    optimized = memrewrite.optimize(model, x, budget="70%")
    assert optimized.report.equivalent
    assert optimized.report.segments
    step = Step("train", torch.optim.AdamW)
    assert run_tracked(optimized, Inputs((x,), {}), step).peak <= optimized.report.predicted_after.peak
    twin = nn.Sequential(*(weight_norm(nn.Linear(16, 16)) if i % 3 == 0 else layer for i, layer in enumerate(model)))
    twin.load_state_dict(optimized.state_dict())
    ours, theirs = (taken(each, lambda step: Inputs((x.clone(),), {})) for each in (optimized, twin))
    assert_same(ours, theirs)
