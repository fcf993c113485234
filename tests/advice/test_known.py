"""What was simulated for one answer is not simulated again for it, and what cannot matter is not simulated at all."""

from typing import Any

import pytest
import torch
from torch import nn

import memrewrite
from memrewrite.advice.optimizers import Frugal
from memrewrite.measurement import measuring
from memrewrite.simulate import simulate
from memrewrite.workload.step import Inputs, Step
from tests.support import fsdp
from tests.support.models import make

Asked = list[tuple[Step, int]]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The steps that are simulated, with their batch sizes."""
    found: Asked = []

    def noted(module: nn.Module, inputs: Inputs, step: Step, **how: Any) -> Any:
        found.append((step, inputs.batch_size))
        return simulate(module, inputs, step, **how)

    monkeypatch.setattr(measuring, "simulate", noted)
    return found


def repeated(asked: Asked) -> Asked:
    return [each for number, each in enumerate(asked) if each in asked[:number]]


@pytest.mark.parametrize("asked", [{}, {"loop": "drop-output"}, {"mesh": "ddp=2"}, {"mode": "inference"}], ids=str)
def test_no_step_is_simulated_twice(simulated: Asked, asked: dict[str, Any]) -> None:
    model, inputs = make("swish")
    model.train(asked.get("mode") != "inference")
    peak = memrewrite.estimate(model, inputs.args, **asked).peak.bytes
    simulated.clear()
    found = memrewrite.estimate(model, inputs.args, device_memory=peak // 2, **asked)
    assert not found.fits
    assert len(simulated) > 3
    assert repeated(simulated) == []


def test_the_mesh_itself_is_simulated_once(simulated: Asked) -> None:
    found = memrewrite.estimate(fsdp.Net(), fsdp.X, mesh="fsdp=64", device_memory="3.8MB")
    assert found.notes == (
        "The smallest mesh of a power of two that fits is fsdp=8, with 3.8 MB (3.6 MiB) on each device.",
    )
    assert repeated(simulated) == []


def test_where_activations_alone_are_too_much_no_other_mesh_is_simulated(simulated: Asked) -> None:
    with torch.device("meta"):
        model, inputs = fsdp.Net(), torch.ones(4096, 16)
    found = memrewrite.estimate(model, inputs, mesh="fsdp=64", device_memory="4MB")
    assert found.notes == ("No mesh of up to fsdp=4096 fits 4.0 MB (3.8 MiB) on each device.",)
    assert {str(step.mesh) for step, _ in simulated} == {"fsdp=64"}


def test_of_one_sample_no_smaller_batch_is_prepared_for(simulated: Asked) -> None:
    model, inputs = fsdp.Net().bfloat16(), torch.ones(1, 512, 16, dtype=torch.bfloat16)
    found = memrewrite.estimate(model, inputs, mesh="fsdp=2", device="cuda", device_memory="1MB")
    assert not found.fits
    assert found.peak.phase == "backward"
    steps = [step for step, _ in simulated]
    assert [step for step in steps if step.amp and step.optimizer is torch.optim.SGD] == []
    assert [step for step in steps if isinstance(step.optimizer, Frugal)] == []
    assert [size for _, size in simulated if size < 1] == []
