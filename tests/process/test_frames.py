"""Frames in one chunk: calls in a loop cost no page faults, wherever chunks end."""

import pytest

from memrewrite.process.frames import in_one_chunk

resource = pytest.importorskip("resource")
CALLS = 2000


def faults_in_calls(depth: int) -> int:
    """The page faults of calls in a loop, so many frames further down."""
    if depth:
        return faults_in_calls(depth - 1)
    before = _faults()
    for _ in range(CALLS):
        _nothing()
    return _faults() - before


def _faults() -> int:
    found: int = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return found


def _nothing() -> None:
    return None


def test_no_loop_of_calls_maps_memory_each_time() -> None:
    together = in_one_chunk(faults_in_calls)
    assert max(together(depth) for depth in range(400)) < CALLS / 2


def test_arguments_results_and_errors_pass_through() -> None:
    @in_one_chunk
    def divided(number: int, *, by: int) -> float:
        """Said of it."""
        return number / by

    assert divided(6, by=4) == 1.5
    assert divided.__doc__ == "Said of it."
    with pytest.raises(ZeroDivisionError):
        divided(6, by=0)
