"""Cached memory goes back to the device where a process may not reserve what a step in pieces takes, and only there."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.capture import capture
from memrewrite.codegen.writer import generate
from memrewrite.plan.marks import Marks
from memrewrite.runtime.dropin import build, program_from
from memrewrite.runtime.room import make_room, room_simulated
from memrewrite.workload.step import Inputs

ON_CUDA: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
ON_CPU: Any = SimpleNamespace(is_cuda=False, device=torch.device("cpu"))


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device of 1,000 bytes, of which this process may take half; it holds 100, and others 300."""
    calls: list[str] = []
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device: (600, 1000),
        "get_per_process_memory_fraction": lambda device: 0.5,
        "memory_reserved": lambda device: 100,
        "empty_cache": lambda: calls.append("emptied"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return calls


@pytest.mark.parametrize(("wanted", "times"), [(499, 0), (500, 0), (501, 1)])
def test_a_process_that_may_take_less_starts_with_nothing_cached(emptied: list[str], wanted: int, times: int) -> None:
    make_room(wanted, ON_CPU, ON_CUDA)
    assert len(emptied) == times


@pytest.mark.parametrize(("wanted", "times"), [(300, 0), (301, 1)])
def test_what_others_hold_counts(emptied: list[str], monkeypatch: pytest.MonkeyPatch, wanted: int, times: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200, 1000))
    make_room(wanted, ON_CUDA)
    assert len(emptied) == times


def test_nothing_is_done_on_the_cpu_or_while_a_graph_is_recorded(
    emptied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room(501, ON_CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    make_room(501, ON_CUDA)
    assert emptied == []


def test_a_program_makes_room_first_and_runs_compiled_as_one_graph() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    source, constants = generate(capture(model, Inputs((x,), {})), marks=Marks(room=12345))
    (line,) = (line.strip() for line in source.splitlines() if "make_room" in line)
    assert line == "make_room(12345, input_1)"
    result, asked = build(model, program_from(source), constants), list[int]()
    with room_simulated(asked.append):
        same(model, result, x)
    assert asked == [12345]
    same(model, torch.compile(result, fullgraph=True, backend="eager"), x)


def same(model: nn.Module, result: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert torch.equal(model(x), result(x))
