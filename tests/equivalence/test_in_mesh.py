"""Both processes of a mesh verify what they run, as it is wrapped there, and both end where one finds it wrong."""

import pytest

from tests.support import proofs
from tests.support.processes import together
from tests.support.proofs import Proved


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Proved]]:
    """What each of two processes found of every model."""
    return together(proofs.proofs, tmp_path_factory.mktemp("proofs"))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What was raised in each of two processes."""
    return together(proofs.failures, tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", proofs.MODELS)
def test_training_in_the_mesh_is_compared_bit_for_bit(proved: list[dict[str, Proved]], name: str, rank: int) -> None:
    found = proved[rank][name]
    assert found.verdict.exact, found.verdict.summary
    kinds = {check.group: check.count for check in found.verdict.checks}
    assert kinds["loss"] == 1
    assert kinds["gradient"] == kinds["parameter"] > 10
    assert found.changed == []


@pytest.mark.parametrize("model", ["before", "after", "ddp"])
@pytest.mark.parametrize("name", ["wrong in both", "wrong in one"])
def test_a_wrong_rewrite_ends_all(failed: list[dict[str, str]], name: str, model: str) -> None:
    first, second = (each[f"{name}, {model}"] for each in failed)
    assert first == second
    mesh = "ddp=2,gradient-as-bucket-view" if model == "ddp" else "fsdp=2"
    assert first.startswith(
        f"NotEquivalentError: The rewritten model is not equivalent in the mesh {mesh}, by process 0"
    )
    assert "values differ" in first


@pytest.mark.parametrize("model", ["before", "after", "ddp"])
def test_a_process_that_fails_ends_all(failed: list[dict[str, str]], model: str) -> None:
    first, second = (each[f"failing in one, {model}"] for each in failed)
    assert first == second
    assert first.startswith("MeasurementError: Process 1 failed while the rewritten model was verified in the mesh ")
    assert first.endswith(": ZeroDivisionError: no step here.")
