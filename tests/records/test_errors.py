"""Errors go from one process to another: the first process of a mesh plans for all and tells what went wrong."""

import pickle

import pytest

from memrewrite.process.child import _answer
from memrewrite.records import errors
from memrewrite.records.errors import (
    BudgetInfeasibleError,
    FixedSizeError,
    MeasurementError,
    MemrewriteError,
    UnfitCallError,
)
from memrewrite.records.outcomes import Option

OF_MORE = {
    BudgetInfeasibleError: BudgetInfeasibleError("No plan.", 3, ("Less fits.",), (Option("batch 1", 2, True, "time"),)),
    FixedSizeError: FixedSizeError("Cannot take x:1=2..8.", "its forward takes no other.", ["b", "a"]),
    UnfitCallError: UnfitCallError("act gives no tensor.", "act"),
}
KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, MemrewriteError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_in_another_process(kind: type[MemrewriteError]) -> None:
    error = OF_MORE.get(kind) or kind("What is wrong.")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (kind, str(error), vars(error))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_measuring_process_raises_is_raised_with_its_sentence(kind: type[MemrewriteError]) -> None:
    with pytest.raises(MeasurementError if kind in OF_MORE else kind, match="What is wrong"):
        _answer(f'{{"error": ["{kind.__name__}", "What is wrong."]}}', 0)
