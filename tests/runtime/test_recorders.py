"""Hooks that a model registers in its first forward to record what its layers give, as transformers 5.23 does."""

import copy
import warnings
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.runtime.dropin import own
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.runtime.recorders import INSTALLED, is_recorder
from tests.support.dropins import assert_same_bits, step

WIDTH = 8
COLLECTOR: ContextVar[list[Tensor] | None] = ContextVar("collector", default=None)
_NAMES: dict[str, Any] = {"__name__": "transformers.utils.output_capturing", "_active_collector": COLLECTOR}
exec(  # noqa: S102  (in that module's name)
    """
def record(module, args, output):
    found = _active_collector.get()
    if found is not None:
        found.append(output)
""",
    _NAMES,
)


class Recording(nn.Module):
    """Adds up what its layers give, which it records."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, INSTALLED, False):
            for layer in self.layers:
                layer.register_forward_hook(_NAMES["record"])
            setattr(self, INSTALLED, True)
        found: list[Tensor] = []
        token = COLLECTOR.set(found)
        try:
            self.layers(x)
        finally:
            COLLECTOR.reset(token)
        return torch.stack(found).sum(0)


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(256, WIDTH)


def recording() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Recording(), nn.Linear(WIDTH, WIDTH))


def recorders(model: nn.Module) -> int:
    return sum(is_recorder(hook) for module in model.modules() for hook in module._forward_hooks.values())


def optimized(model: nn.Module) -> Any:
    result = memrewrite.optimize(model, example(), budget="min")
    assert own(result) is not None
    return result


def test_a_step_after_an_evaluation_runs_the_program() -> None:
    model = recording()
    result, twin = optimized(model), copy.deepcopy(model)
    assert recorders(model) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(result, example())
        result.eval()(example())  # the original forward, on the layers that both have
        assert recorders(result) == recorders(model) == 4
        numbers = step(result.train(), example())
    assert_same_bits(numbers, step(twin, example()))


@pytest.mark.parametrize("first", ["result", "model"])
def test_a_model_and_its_result_register_on_their_layers_once(first: str) -> None:
    torch.manual_seed(0)
    model = Recording()
    result = optimized(model)
    assert not getattr(result, INSTALLED)
    for called in (result, model) if first == "result" else (model, result):
        called.eval()(example())
    assert recorders(model) == recorders(result) == 4
    assert getattr(model, INSTALLED) is getattr(result, INSTALLED) is True


def test_a_model_that_ran_before_is_planned_as_one_that_did_not() -> None:
    model = recording()
    model(example())
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    ours, fresh = optimized(model).report, optimized(recording()).report
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert recorders(model) == 4
    assert getattr(model[0], INSTALLED) is True
    assert (ours.predicted_after.peak, ours.segments) == (fresh.predicted_after.peak, fresh.segments)
    assert ours.config["regions"] == fresh.config["regions"]


def test_what_is_recorded_for_somebody_else_runs_the_original() -> None:
    model, found = recording(), list[Tensor]()
    result = optimized(model)
    model(example())
    token = COLLECTOR.set(found)
    try:
        for layer in result[0].layers:
            layer(example())  # its hooks record
        assert len(found) == 4
        with pytest.warns(FallbackWarning, match="has a hook"):
            result(example())
    finally:
        COLLECTOR.reset(token)


def test_any_other_hook_matters() -> None:
    model = recording()
    result = optimized(model)
    model(example())
    result[0].layers[2].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.warns(FallbackWarning, match="layers.2 has a hook"):
        assert torch.equal(result(example()), model(example()))
