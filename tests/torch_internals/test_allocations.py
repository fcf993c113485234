"""The history of requests: read from records as PyTorch makes them, and on CUDA from PyTorch itself."""

from typing import Any

import pytest
import torch

from memrewrite.torch_internals.allocations import recorded_allocations

CUDA = torch.device("cuda", 0)
TRACE = [  # a request while somebody else's block goes, then one that gets the address of the first again
    ("segment_alloc", 100, 2048),
    ("alloc", 100, 1000),
    ("alloc", 200, 500),
    ("free_requested", 100, 1024),
    ("free_completed", 100, 1024),
    ("free_requested", 900, 512),
    ("alloc", 100, 700),
    ("free_requested", 100, 1024),
]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """PyTorch's recording, replaced; what was asked of it, and whether somebody records already."""
    asked: list[Any] = []
    counts = iter([(3, 1), (3, 1), (6, 4)])

    def stats(device: Any) -> Any:
        requests, freed = next(counts)
        return {"allocation": {"all": {"allocated": requests, "freed": freed}}}

    trace = [{"action": action, "addr": address, "size": size} for action, address, size in TRACE]
    memory = torch.cuda.memory
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: "theirs" in asked, raising=False)
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled, **_: asked.append(enabled))
    monkeypatch.setattr(memory, "_snapshot", lambda device: {"device_traces": [trace]})
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    return asked


def test_a_course_says_what_was_asked_for_and_what_was_given_back(recorder: list[Any]) -> None:
    with recorded_allocations(CUDA) as history:
        first, last = history.moment(), history.moment()
    assert (first, last) == (0, 6)
    assert history.course(first, last) == (1000, 500, -1, 700, -3)
    assert history.course(1, 4) == (500,)
    assert recorder == ["all", None]


def test_a_recording_of_the_users_goes_on(recorder: list[Any]) -> None:
    recorder.append("theirs")
    with recorded_allocations(CUDA) as history:
        first, last = history.moment(), history.moment()
    assert history.course(first, last) == ()
    assert recorder == ["theirs"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pytorch_records_requests_as_they_are_made() -> None:
    with recorded_allocations(CUDA) as history:
        first = history.moment()
        tensor = torch.empty(3 * 2**20, dtype=torch.uint8, device=CUDA)
        between = torch.empty(5 * 2**20, dtype=torch.uint8, device=CUDA)
        del tensor
        last = history.moment()
    assert history.course(first, last) == (3 * 2**20, 5 * 2**20, -1)
    assert between.is_cuda
