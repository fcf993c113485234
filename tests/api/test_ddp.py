"""Under DDP, in two processes: the same training bit for bit, within the budget that was met with its buckets."""

import pytest

from tests.support import ddp
from tests.support.ddp import Outcome
from tests.support.processes import together

Found = list[tuple[dict[str, Outcome], list[str]]]
# Bytes: on the CPU the reducer's table of used parameters is made of memory that simulation does not count, and gloo's
# thread may hold that of the step before.
USED = 2 * 512


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes found."""
    return together(ddp.everything, tmp_path_factory.mktemp("ddp"), ddp.FIRST)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What they found in the other settings."""
    names = tuple(name for name in ddp.SETTINGS if name not in ddp.FIRST)
    return together(ddp.everything, tmp_path_factory.mktemp("ddp"), names)


@pytest.fixture
def ranks(name: str, request: pytest.FixtureRequest) -> Found:
    """Where a setting is found."""
    result: Found = request.getfixturevalue("first" if name in ddp.FIRST else "others")
    return result


@pytest.mark.parametrize("name", [*ddp.SETTINGS, ddp.WRAPPED])
def test_training_is_the_same_and_within_the_budget(ranks: Found, name: str) -> None:
    one, other = (outcomes[name] for outcomes, _ in ranks)
    for found in (one, other):
        assert found.differs == []
        more = 0 if name == ddp.WRAPPED else USED
        assert found.predicted_before <= found.peak_before <= found.predicted_before + more
        assert found.predicted <= found.peak <= found.predicted + more
        assert found.peak <= found.budget < found.predicted_before
    assert one.programs == other.programs != []


def test_what_one_process_cannot_do_ends_all(first: Found) -> None:
    (_, one), (_, other) = first
    assert one == other
    infeasible, broken = one
    assert infeasible.startswith("BudgetInfeasibleError: No plan fits 1000 B: the lowest reachable peak is")
    assert broken.startswith(
        "CaptureError: loss_fn fails on what Net gives with ZeroDivisionError: no loss here (at ddp.py:"
    )
