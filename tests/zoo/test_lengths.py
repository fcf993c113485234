"""``pytest -m zoo tests/zoo/test_lengths.py``: every text model runs at other lengths in its plan, every bit the same.

Minutes, so not by default.
"""

import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.runtime.promise import BeyondPlanWarning, FallbackWarning
from memrewrite.simulate import run_tracked
from memrewrite.torch_internals.pytrees import tree_iter
from memrewrite.workload.step import Inputs, Step
from tests.zoo.architectures import VOCABULARY
from tests.zoo.models import ZOO, Entry, build

pytestmark = pytest.mark.zoo

TEXTS = [entry for entry in ZOO if entry.inputs in ("text", "masked text", "pair")]
# Whose layers go from token to token in Python, fill texts up to chunks of 16, or make lists of positions; the masks of
# recurrent_gemma depend on whether a text is longer than its window. What does so stays a call, and a mask is always
# made, where the range of lengths is named; else the plan is for the example's length, or those that 16 divides.
FAMILIES = ("falcon_mamba", "mamba", "rwkv", "bamba", "mamba2", "zamba2", "funnel", "recurrent_gemma")
NAMED = {f"transformers/{family}" for family in FAMILIES}
# What their experts are given has as many rows as the values choose, which may be more than was planned for.
BY_VALUES = {"transformers/switch_transformers"}
LAST_BITS = {"transformers/gpt_oss"}  # whose gradients are added in another order, at any length


def cut(inputs: Inputs, length: int) -> Inputs:
    """The first so many tokens of each text."""
    return Inputs((), {name: value[:, :length].contiguous() for name, value in inputs.kwargs.items()})


def taken(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What a step gives: every number of the output, and the gradients."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    output = model(**inputs.kwargs)
    output.loss.backward()
    found = [leaf.detach() for leaf in tree_iter(dict(output)) if isinstance(leaf, Tensor)]
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry.key)
def test_other_lengths_run_in_the_plan(entry: Entry) -> None:
    torch.manual_seed(0)
    model, inputs = build(entry)
    longest = inputs.kwargs["input_ids"].shape[1]
    options: dict[str, Any] = {"dynamic": {"input_ids": {1: (2, longest)}}} if entry.key in NAMED else {}
    options |= {"example_kwargs": inputs.kwargs, "budget": "min", "exact": True, "verify": False}
    try:
        result = memrewrite.optimize(model, (), **options)
    except BudgetInfeasibleError:
        pytest.skip("No plan is lower.")
    step = Step("train", torch.optim.AdamW)
    promised = result.report.predicted_after.peak
    for length in (longest, 3 * longest // 4, longest // 2 + 1):
        given = cut(inputs, length)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            if entry.key in BY_VALUES:
                warnings.simplefilter("ignore", BeyondPlanWarning)
            found = taken(result, given)
        expected = taken(model, given)
        assert len(found) == len(expected)
        same = partial(torch.allclose, atol=1e-6) if entry.key in LAST_BITS else torch.equal
        assert all(map(same, found, expected)), length
        result.zero_grad(set_to_none=True)
        gc.collect()  # some models leave tensors in cycles
        if entry.key not in BY_VALUES:
            assert run_tracked(result, given, step).peak <= promised


def packed(*lengths: int) -> Inputs:
    """Texts one after another in a row, each with positions of its own."""
    ids = torch.randint(5, VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return Inputs((), {"input_ids": ids, "position_ids": positions, "labels": ids.clone()})


def test_packed_texts_run_in_the_plan() -> None:
    torch.manual_seed(0)
    model, _ = build(next(entry for entry in TEXTS if entry.key == "transformers/llama"))
    example = packed(20, 30, 14).kwargs
    result = memrewrite.optimize(model, (), example_kwargs=example, budget="min", exact=True)
    assert result.report.equivalent
    step = Step("train", torch.optim.AdamW)
    for lengths in ((20, 30, 14), (1, 63), (20, 28), (31,), (5, 5, 7)):
        given = packed(*lengths)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            assert all(map(torch.equal, taken(result, given), taken(model, given))), lengths
        result.zero_grad(set_to_none=True)
        assert run_tracked(result, given, step).peak <= result.report.predicted_after.peak
