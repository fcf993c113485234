"""What is told where gradients are there as backward begins, which no plan counts."""

import warnings
from typing import Any

import pytest
import torch

from memrewrite.backends import entry
from memrewrite.runtime.promise import BeyondPlanWarning
from tests.backends.test_partition import mlp

GRADIENTS = 8 * (32 * 32 * 4 + 512)  # bytes, each storage rounded up


@pytest.mark.usefixtures("partitions")
@pytest.mark.parametrize(
    ("frees", "reserve", "told"),
    [
        ("after the step", 0, False),
        ("before backward", 0, False),
        ("in place", 0, True),
        ("never", 0, True),
        ("never", GRADIENTS, False),
    ],
)
def test_gradients_that_are_there_in_backward_are_told_of(frees: str, reserve: int, told: bool) -> None:
    model, budget = mlp(), 330_000
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: Any = {"budget": budget, "optimizer": "sgd", "reserve": reserve}
    compiled = torch.compile(model, backend=entry.memrewrite, options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BeyondPlanWarning)
        for _ in range(3):
            loss = compiled(torch.randn(256, 32))
            if frees == "before backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if frees in ("after the step", "in place"):
                optimizer.zero_grad(set_to_none=frees == "after the step")
    words = [str(each.message) for each in caught if each.category is BeyondPlanWarning]
    assert len(words) == told
    for sentence in words:
        assert "backward while gradients are there, of micro-batches before or zeroed in place" in sentence
        assert sentence.endswith(f"; compile with reserve={GRADIENTS}.")
