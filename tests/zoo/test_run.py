"""The zoo's runner with a model that needs no library: it is to work on the day it is needed."""

import pytest
import torch
from torch import nn

from memrewrite.workload.step import Inputs
from tests.zoo import run
from tests.zoo.models import Entry


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_model_becomes_a_row(monkeypatch: pytest.MonkeyPatch, amp: str) -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    made = nn.Sequential(*layers), Inputs((torch.randn(512, 16),), {})
    monkeypatch.setattr(run, "build", lambda entry: made)
    row = run.examine(Entry("none", "layers", "layers"), amp)
    assert row.outcome == "verified", row.sentence
    assert row.amp == amp
    assert row.predicted == row.tracked
    assert (row.predicted or 0) <= (row.budget or 0)
    assert row.segments
    assert 0 < (row.overhead or 0) < 1
