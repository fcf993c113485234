"""The models of ``tests.benchmarks.newcomers`` at tiny sizes on the CPU: optimized, verified and measured."""

import importlib.util

import pytest

from tests.benchmarks import newcomers
from tests.benchmarks.attempts import in_process
from tests.benchmarks.newcomers import MODELS

DIFFUSERS = [name for name in MODELS if name.endswith(("Model", "KL"))]


@pytest.mark.zoo
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
@pytest.mark.parametrize("name", DIFFUSERS)
def test_a_model_of_diffusers_is_optimized_and_measured(name: str) -> None:
    row = in_process(newcomers.__name__, name, tiny=True, deadline=900)
    assert row["ok"], row["note"]
    assert 0 < row["peak"] <= row["original"]
