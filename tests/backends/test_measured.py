"""What a GPU's allocator counts in the first steps, beside what was told; its counts are made up, as it takes a GPU to
have some."""

import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memrewrite.backends import measured
from memrewrite.backends.asked import Asked
from memrewrite.backends.resident import Resident
from memrewrite.records.options import Budget
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.torch_internals.fake_tensors import FakeTensorMode

TOLD, BUDGET = 5_000, 6_000
LIVES = Resident(512, 512, 0, 0, 0, 0, 0, 0, 0)
OWNERS = [object(), object()]


class Graph:
    """A graph on a GPU of which ``TOLD`` bytes are told, in a step of one of the ``OWNERS``."""

    def __init__(self, owner: int = 0, **asked: Any) -> None:
        asks = Asked(Budget.parse(BUDGET), **asked)
        known: Any = SimpleNamespace(peak=TOLD, measured=None, given_out=0, lives=LIVES, asked=asks)
        self.partition = known
        with FakeTensorMode():
            given = [torch.empty(1, device="cuda")]
        self.run = measured.watched(lambda *args: args, given, known, OWNERS[owner], "Net")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What tensors take and took at most, in bytes."""
    found = {"now": 1_024, "most": 2_000}
    monkeypatch.setattr(measured, "allocated", lambda device: (found["now"], found["most"]))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: found.update(most=found["now"]))
    return found


def told(counts: dict[str, int], graph: Graph, peaks: Iterable[int], *args: Any) -> list[str]:
    """What calls warn of, by each of which so many bytes were taken at most."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for counts["most"] in peaks:
            graph.run(*args)
    return [str(each.message) for each in caught if each.category is BeyondPlanWarning]


@pytest.mark.parametrize(
    ("peaks", "found"),
    [
        ([2_000, 4_000, 5_900, 6_000, 6_000], 6_000),  # within the budget
        ([2_000, 9_000, 5_900, 5_900, 5_900], 5_900),  # kernels are tried out, or a proof runs, in the first step
        ([2_000, 4_000, 4_000, 4_000, 4_000], None),  # less than in the first step: nothing is known
    ],
)
def test_what_is_measured_is_what_the_count_rises_to(
    counts: dict[str, int], peaks: list[int], found: int | None
) -> None:
    graph = Graph()
    assert not told(counts, graph, peaks)
    assert graph.partition.measured == found


def test_a_step_above_its_budget_is_told_once_with_the_reserve_that_it_needs(counts: dict[str, int]) -> None:
    graph = Graph(reserve=50)
    (words,) = told(counts, graph, [2_000, 2_000, 6_500, 6_600, 6_700])
    assert words.startswith("A step of Net took 6500 B of 6000 B, where 5000 B were told")
    assert words.endswith("Compile with reserve=1550.")
    assert graph.partition.measured == 6_500


def test_what_lives_beside_the_model_does_not_count(counts: dict[str, int]) -> None:
    graph, weight = Graph(), nn.Parameter(torch.zeros(128))
    weight.grad = torch.zeros(128)
    counts["now"] += 512 + 1_000  # a gradient, and another model
    assert not told(counts, graph, [2_000, 2_000, 6_500], weight)
    assert graph.partition.measured == 5_500


def test_evaluation_other_models_and_what_is_compiled_are_no_part_of_a_step(counts: dict[str, int]) -> None:
    graph, other = Graph(), Graph(owner=1)
    told(counts, graph, [2_000, 2_000])
    with torch.no_grad():
        told(counts, graph, [7_000])
    assert not told(counts, graph, [8_000])
    assert not told(counts, other, [9_000])
    assert not told(counts, graph, [10_000])
    Graph()
    assert not told(counts, graph, [11_000])
    assert graph.partition.measured is None
    assert told(counts, graph, [12_000])


def test_an_allocator_that_counts_nothing_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def counts_nothing(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(measured, "allocated", counts_nothing)
    graph = Graph()
    assert [graph.run(i) for i in range(3)] == [(0,), (1,), (2,)]
    assert len(asked) == 1
