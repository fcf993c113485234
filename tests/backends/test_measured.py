"""What a GPU's allocator counts in the first steps, beside what was told; its counts are made up, as it takes a GPU to
have some."""

import copy
import warnings
from collections.abc import Callable, Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memrewrite
from memrewrite.backends import measured
from memrewrite.backends.asked import Asked
from memrewrite.backends.calls import Part
from memrewrite.backends.partition import Partition
from memrewrite.backends.resident import Resident
from memrewrite.backends.steps import Step
from memrewrite.records.compiled import CompiledReport
from memrewrite.records.options import Budget
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from tests.backends.test_later_graphs import Three
from tests.backends.test_partition import Block

TOLD, BUDGET = 5_000, 6_000
LIVES = Resident(512, 512, 0, 0, 0, 0, 0, 0, 0)


class Graph:
    """A graph on a GPU of which ``TOLD`` bytes are told, in a step of its own or with ``others``."""

    def __init__(self, others: "Graph | None" = None, **asked: Any) -> None:
        asks = Asked(Budget.parse(BUDGET), **asked)
        self.step: Step = Step(asks) if others is None else others.step
        known: Any = SimpleNamespace(
            peak=TOLD, alone=None, measured=None, given_out=0, lives=LIVES, kept=0, replaced=False, communicates=False
        )
        self.partition, self.weight = known, nn.Parameter(torch.zeros(128))
        self.step._parts[f"{id(self)}"] = Part(known, None, lambda: None, None, 0, 0, 0)
        with FakeTensorMode():
            given = [torch.empty(1, device="cuda")]
        self.run = measured.watched(lambda weight: weight * 2, given, known, self.step, "Net")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What tensors take and took at most, in bytes."""
    found = {"now": 1_024, "most": 2_000}
    monkeypatch.setattr(measured, "allocated", lambda device: (found["now"], found["most"]))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: found.update(most=found["now"]))
    return found


def told(counts: dict[str, int], graph: Graph, peaks: Iterable[int], calls: int = 1) -> list[str]:
    """What steps of some ``calls`` warn of; as each begins, so many bytes were taken at most."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for counts["most"] in peaks:
            results = []
            for _ in range(calls):
                results.append(graph.run(graph.weight))
                counts["now"] += 100  # is kept until backward
            counts["now"] -= 100 * calls
            if torch.is_grad_enabled():
                torch.autograd.grad([each.sum() for each in results], graph.weight)
    return [str(each.message) for each in caught if each.category is BeyondPlanWarning]


@pytest.mark.parametrize(
    ("peaks", "found"),
    [
        ([2_000, 4_000, 5_900, 6_000, 6_000], 6_000),  # within the budget
        ([2_000, 9_000, 5_900, 5_900, 5_900], 5_900),  # kernels are tried out, or a proof runs, in the first step
        ([2_000, 4_000, 4_000, 4_000, 4_000], 4_000),
        ([5_000, 5_000, 5_000, 5_000, 5_000], None),  # less than what ran before: nothing is known
    ],
)
def test_what_is_measured_is_what_the_count_rises_to(
    counts: dict[str, int], peaks: list[int], found: int | None
) -> None:
    graph = Graph()
    assert not told(counts, graph, peaks)
    assert graph.partition.measured == found


@pytest.mark.parametrize("calls", [1, 3])
def test_a_step_above_its_budget_is_told_once_with_what_makes_room_for_it(counts: dict[str, int], calls: int) -> None:
    """Where other processes have to agree, that is all; where a graph is called several times, a step is one."""
    graph = Graph(reserve=50)
    graph.partition.communicates = True
    (words,) = told(counts, graph, [2_000, 2_000, 6_500, 6_600, 6_700], calls)
    assert words.startswith("A step of Net took 6500 B of 6000 B, where 5000 B were told")
    assert words.endswith("Compile with reserve=1550.")
    assert graph.partition.measured == 6_500
    assert graph.step.asked.reserve == 50


def test_a_step_above_its_budget_is_compiled_again_twice_at_most(counts: dict[str, int]) -> None:
    graph = Graph(reserve=50)
    (words,) = told(counts, graph, [2_000, 2_000, 6_500])
    assert words.endswith("It is compiled again to make room for that, as reserve=1550 does from the first step on.")
    assert graph.step.asked.reserve == 1_550
    again = Graph(graph)
    again.partition.peak = 6_000
    assert told(counts, again, [2_000, 2_000, 6_200])
    assert graph.step.asked.reserve == 1_750
    last = Graph(graph)
    (words,) = told(counts, last, [2_000, 2_000, 6_300])
    assert words.endswith("Compile with reserve=2050.")


def test_layers_that_make_no_gradients_are_looked_at_from_call_to_call(counts: dict[str, int]) -> None:
    graph = Graph()
    graph.weight.requires_grad_(False)
    for counts["most"] in (2_000, 2_000, 5_900):
        graph.run(graph.weight)
    assert graph.partition.measured == 5_900


def test_what_lives_beside_the_model_does_not_count(counts: dict[str, int]) -> None:
    graph = Graph()
    graph.weight.grad = torch.zeros(128)
    counts["now"] += 512 + 1_000 - 512  # a gradient, and another model; no state yet
    assert not told(counts, graph, [2_000])
    counts["now"] += 512 + 700  # state, and outputs that are kept
    assert not told(counts, graph, [2_000, 6_500])
    assert graph.partition.measured == 5_500


def test_evaluation_other_models_and_what_is_compiled_are_no_part_of_a_step(counts: dict[str, int]) -> None:
    graph, other = Graph(), Graph()
    told(counts, graph, [2_000, 2_000])
    with torch.no_grad():
        told(counts, graph, [7_000])
    assert not told(counts, graph, [8_000])
    assert not told(counts, other, [9_000])
    assert not told(counts, graph, [10_000])
    Graph()
    assert not told(counts, graph, [11_000])
    assert graph.partition.measured is None
    assert told(counts, graph, [12_000, 13_000])


def test_an_allocator_that_counts_nothing_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def counts_nothing(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(measured, "allocated", counts_nothing)
    graph = Graph()
    assert [graph.run(i) for i in range(3)] == [0, 2, 4]
    assert len(asked) == 1


def block() -> nn.Module:
    """A model of one graph."""
    return Block(32)


def blocks() -> nn.Module:
    """Blocks that are compiled one by one, as one code."""
    return nn.Sequential(*(Block(32) for _ in range(4)))


class Trained:
    """A compiled model in training whose loss, outside of it, takes so many bytes ``beside``; a step's ``peak`` is what
    the allocator of the CPU says of it, as that of a GPU would."""

    def __init__(self, model: nn.Module, budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        self.model, self.original = model, copy.deepcopy(model)
        self.beside, self.peak, self.x = 0, 0, torch.randn(512, 32)
        parts = [*model] if isinstance(model, nn.Sequential) else [model]
        for part in parts:
            part.compile(backend="memrewrite", options={"budget": budget, "optimizer": "sgd"})
        monkeypatch.setattr(measured, "_counted", lambda inputs: torch.device("cpu"))
        monkeypatch.setattr(measured, "allocated", lambda device: (0, self.peak))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)

    @property
    def report(self) -> CompiledReport:
        made: Any = self.model
        found: CompiledReport = memrewrite.report_of(made)
        return found

    def steps(self, count: int) -> list[str]:
        """What that many steps warn of; their gradients are those of the original."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                made = self._step()
                known = torch.autograd.grad(self.original(self.x).square().mean(), [*self.original.parameters()])
                torch.testing.assert_close(made, known)
        return [str(each.message) for each in caught if each.category is BeyondPlanWarning]

    def _step(self) -> tuple[torch.Tensor, ...]:
        parameters = [*self.model.parameters()]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = self.model(self.x).square().mean()
            torch.empty(self.beside, dtype=torch.uint8)
            made = torch.autograd.grad(loss, parameters)
        results: Any = profiler.profiler
        changes = (event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]")
        self.peak = self.x.nbytes + sum(p.nbytes for p in parameters) + max(accumulate(changes))
        return made


@pytest.mark.parametrize("model", [block, Three, blocks])
def test_what_a_loss_takes_outside_is_made_room_for(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    asked = Trained(model(), "100%", monkeypatch)
    assert asked.steps(2) == []
    most = asked.report.peak
    assert most is not None
    trained = Trained(asked.original, most, monkeypatch)
    assert trained.steps(3) == []
    trained.beside = most // 2
    assert len(trained.steps(5)) == 1
    assert trained.report.loss > 0
    assert trained.peak <= most


@pytest.mark.parametrize("model", [block, Three, blocks])
def test_where_no_plan_is_left_it_goes_on_as_before(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, partitions: list[Partition]
) -> None:
    torch.manual_seed(0)
    trained = Trained(model(), 4_000_000, monkeypatch)
    assert trained.steps(3) == []
    before = trained.report.peak
    trained.beside = 4_000_000
    _, stays = trained.steps(6)
    assert "stays above its budget with what runs outside of it. No plan for torch.compile fits 4.0 MB" in stays
    assert (trained.report.peak, trained.report.loss) == (before, 0)
