"""Both processes of a mesh verify what they run, as it is wrapped there, and both end where one finds it wrong."""

import pytest

from tests.support import proofs
from tests.support.processes import together
from tests.support.proofs import Proved

Found = list[tuple[dict[str, Proved], dict[str, str]]]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes found of some models, and what was said or raised in it where something is broken."""
    return together(proofs.found, tmp_path_factory.mktemp("proofs"), proofs.FIRST)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What they found of the others."""
    names = tuple(name for name in proofs.MODELS if name not in proofs.FIRST)
    return together(proofs.found, tmp_path_factory.mktemp("proofs"), names)


@pytest.fixture
def found(name: str, request: pytest.FixtureRequest) -> Found:
    """Where a model is found."""
    result: Found = request.getfixturevalue("first" if name in proofs.FIRST else "others")
    return result


def same_in_both(found: Found, name: str) -> str:
    first, second = (each[name] for _, each in found)
    assert first == second
    return first


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", proofs.MODELS)
def test_training_in_the_mesh_is_compared_bit_for_bit(found: Found, name: str, rank: int) -> None:
    proved = found[rank][0][name]
    assert proved.verdict.exact, proved.verdict.summary
    kinds = {check.group: check.count for check in proved.verdict.checks}
    assert kinds["loss"] == 1
    assert kinds["gradient"] == kinds["parameter"] > 10
    assert proved.changed == []


def test_the_report_says_where_it_was_verified(first: Found) -> None:
    notes = first[1][0]["fsdp"].notes
    said = "Verified in each process of the mesh fsdp=2; this one: bit-equal: 3 steps, 16 gradients, 0 buffers, random"
    assert any(note.startswith(said) for note in notes)


@pytest.mark.parametrize("name", proofs.FAILING)
def test_a_wrong_rewrite_ends_all(found: Found, name: str) -> None:
    raised = same_in_both(found, f"wrong, {name}")
    meshes = {"ddp": "ddp=2,gradient-as-bucket-view", "in both": "fsdp=1,tp=2"}
    mesh = meshes.get(name, "tp=2" if "tensor" in name else "fsdp=2")
    assert raised.startswith(
        f"NotEquivalentError: The rewritten model is not equivalent in the mesh {mesh}, by process "
    )
    assert "values differ" in raised


@pytest.mark.parametrize("name", proofs.FAILING)
def test_a_process_that_fails_ends_all(found: Found, name: str) -> None:
    raised = same_in_both(found, f"failing, {name}")
    assert raised.startswith("MeasurementError: Process 1 failed while the rewritten model was verified in the mesh ")
    assert raised.endswith(": ZeroDivisionError: no step here.")


def test_optimize_raises_it_in_all(first: Found) -> None:
    assert same_in_both(first, "in optimize").startswith(
        "NotEquivalentError: The rewritten model is not equivalent in "
    )


def test_nothing_is_verified_where_that_is_not_asked_for(first: Found) -> None:
    assert "erified in each process" not in same_in_both(first, "unasked")
    assert "Error" not in same_in_both(first, "unasked")


def test_where_one_has_no_memory_all_take_less(first: Found) -> None:
    assert "; verified at batch 4, as 8 does not fit in memory" in same_in_both(first, "less memory")


def test_where_one_has_no_memory_at_all_all_end(first: Found) -> None:
    assert "does not fit in memory even at batch 1" in same_in_both(first, "no memory")


def test_a_process_that_goes_ends_the_others(first: Found) -> None:
    one, other = (each["interrupted"] for _, each in first)
    assert one == "MeasurementError: A process ended while the rewritten model was verified in the mesh."
    assert other.startswith("KeyboardInterrupt")
