"""Several graphs of one model: the first step takes little, and shows how much each may keep."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.backends import entry, steps
from memrewrite.backends.asked import Asked
from memrewrite.backends.choices import InStep
from memrewrite.backends.observed import Seen
from memrewrite.backends.partition import Partition
from memrewrite.backends.resident import Resident
from memrewrite.backends.steps import Step
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.simulate import simulate
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.fsdp_states import in_transit
from memrewrite.torch_internals.spread import local_part
from memrewrite.workload.step import Inputs
from memrewrite.workload.stepspec import StepSpec
from tests.backends.test_partition import Block
from tests.support.fsdp import Net


class Three(nn.Module):
    """Three graphs of a block each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (Block(32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        result: Tensor = self.third(x)
        return result.square().mean()


class Stack(nn.Module):
    """Blocks that are compiled one by one, as one code, and a head that takes more than any of them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(32) for _ in range(depth)), nn.Linear(32, 512)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return of_logits(self.head(x))


class Late(Stack):
    """All parameters are in the first graph, and the loss in another."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        torch._dynamo.graph_break()
        return of_logits(x)


def of_logits(logits: Tensor) -> Tensor:
    """A function of its own, in which no module is."""
    return logits.exp().sum(-1).log().mean()


def trained(
    model: nn.Module, x: Tensor, budget: str | int, after: Callable[[], object] = lambda: None
) -> tuple[list[Tensor], Any]:
    """The losses of three steps, ``after`` each of which something is done, and the report."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=entry.memrewrite, options={"optimizer": "none", "budget": budget})
    losses = []
    for _ in range(3):
        loss: Tensor = compiled(x)
        loss.backward()
        model.zero_grad()
        losses.append(loss.detach())
        after()
    return losses, memrewrite.report_of(compiled)


@pytest.fixture(params=[Three, Stack, Late])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = request.param()
    return made


X = torch.randn(4, 64, 32)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, where it resumes


@pytest.mark.usefixtures("partitions")
def test_the_step_stays_within_the_budget(model: nn.Module) -> None:
    """No graph is left without room by those before it, nor leaves more than it has to."""
    expected, report = trained(model, X, "100%")
    usual = report.peak
    assert {graph.choice for graph in report.graphs if graph.kept_before} == {"usual"}
    lowest = trained(model, X, "min")[1].peak
    before = lowest
    for share in (0.3, 0.7):
        budget = int(lowest + share * (usual - lowest))
        losses, report = trained(model, X, budget)
        assert all(map(torch.equal, losses, expected))
        assert before <= report.peak <= budget
        before = report.peak
    assert before > lowest + 0.3 * (usual - lowest)


def test_the_second_step_is_the_last_to_compile(model: nn.Module, partitions: list[Partition]) -> None:
    compiled: list[list[InStep | None]] = []
    trained(model, X, "80%", lambda: compiled.append([partition.in_step for partition in partitions]))
    first, second, third = compiled
    assert first == ([None, InStep(late=True)] if isinstance(model, Late) else [InStep()] * len(first))
    assert second[: len(first)] == first
    settled = second[len(first) :]
    assert len({*settled}) <= 1
    assert InStep() not in settled
    assert len(second) == len(third) <= 2 * len(first)
    assert settled or isinstance(model, Late)


def test_what_fits_in_percent_stays_also_where_its_code_takes_more(
    partitions: list[Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a budget is one of what is foreseen, in a step of several graphs as in one of one."""

    def more(*given: Any) -> Seen:
        foreseen = partitions[-1].foreseen
        assert foreseen is not None
        return Seen(foreseen.after - partitions[-1].base + 50_000, 0)

    monkeypatch.setattr(entry, "seen", more)
    torch.manual_seed(0)
    report = trained(Late(), X, "80%")[1]
    whole = report.graphs[0]
    assert len(partitions) == len(report.graphs) == 2
    assert partitions[0].foreseen is not None
    assert whole.peak == partitions[0].foreseen.after + 50_000 > 0.8 * whole.peak_before


@pytest.mark.parametrize("worth", [0.0, 1.0])
def test_what_fits_stays_where_others_are_hardly_faster(
    worth: float, partitions: list[Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_WORTH", worth)
    torch.manual_seed(0)
    trained(Three(), X, "90%")
    assert len(partitions) == (3 if worth else 6)


@pytest.mark.usefixtures("partitions")
def test_the_lowest_peak_that_is_named_is_reached(model: nn.Module) -> None:
    with pytest.raises(BudgetInfeasibleError) as caught:
        trained(model, X, 400_000)
    lowest = trained(model, X, "min")[1].peak
    assert caught.value.lowest is not None
    assert 400_000 < caught.value.lowest <= lowest  # of the first graph that does not fit
    assert trained(model, X, lowest)[1].peak <= lowest


@pytest.mark.usefixtures("partitions")
def test_a_step_is_told_to_the_byte() -> None:
    """What calls keep that no plan tells of does not divide by their number here."""
    torch.manual_seed(0)
    model = Stack(5)
    for asked in ("100%", "min"):
        told = trained(model, X, asked)[1].peak
        assert trained(model, X, told)[1].peak == told


class Whole(nn.Module):
    """One graph with all of the model's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(32), Block(32))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x).square().mean()
        return result


def called(budget: str | int, *steps: int) -> Any:
    """The report of a step with so many calls before one backward, after such ``steps``; 0 is no step, but a call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Whole()
    compiled = torch.compile(model, backend=entry.memrewrite, options={"optimizer": "none", "budget": budget})
    for calls in steps:
        if calls:
            torch.stack([compiled(X) for _ in range(calls)]).sum().backward()
            model.zero_grad()
        else:
            compiled(X)
    return memrewrite.report_of(compiled)


@pytest.mark.usefixtures("partitions")
@pytest.mark.parametrize("asked", ["60%", "min"])
def test_a_graph_that_is_called_several_times_is_told_for_all_of_them(asked: str, notes: Path) -> None:
    usual = called("100%", 3, 3).peak
    (graph,) = called(asked, 3, 3, 3).graphs
    assert graph.peak_before == usual > graph.peak
    shutil.rmtree(notes)
    one = called(asked, 1).graphs[0]
    assert usual > one.peak_before + 2 * one.kept_before - 2**16
    assert called(graph.peak, 3, 3, 3).peak <= graph.peak


@pytest.mark.usefixtures("partitions")
@pytest.mark.parametrize("budget", ["60%", "min"])
def test_later_steps_may_call_more_than_the_first(budget: str) -> None:
    """A graph that was alone is divided anew, as is one from a cache, of which no plans are known either."""
    assert called(budget, 1, 3, 3, 3).peak == called(budget, 3, 3, 3).peak


def test_calls_that_nobody_asks_for_gradients_are_no_part_of_a_step(partitions: list[Partition]) -> None:
    expected = called("60%", 1, 1)
    partitions.clear()
    assert called("60%", 0, 0, 0, 1, 0, 1) == expected
    (partition,) = partitions
    assert partition.in_step is None


@pytest.mark.usefixtures("partitions")
def test_where_others_keep_more_than_was_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has no more room than there is once what others keep is known; of all there is PyTorch's plans are it."""
    torch.manual_seed(0)
    model = Three()
    usual = trained(model, X, "100%")[1].peak
    guess, beyond = Step._peaks, 3

    def lower(*given: Any) -> dict[str, int]:
        return {key: peak - beyond for key, peak in guess(*given).items()}

    monkeypatch.setattr(Step, "_peaks", lower)
    report = trained(model, X, usual - beyond)[1]
    assert usual - 2**16 < report.peak <= usual - beyond
    report = trained(model, X, "100%")[1]
    assert [graph.choice for graph in report.graphs] == ["usual"] * 3


def test_what_was_forgotten_is_told_of_no_more_once_its_code_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Dynamo makes another graph of it: one for sizes that vary, of layers that two parts share."""
    code = of_logits.__code__
    monkeypatch.setattr(steps, "code_of_frame", lambda: code)
    asked, _ = Asked.parse({"budget": "1GB"})
    step, lives = Step(asked), Resident(0, 0, 0, 0, 0, 0, 0, 0, 0)
    first, second = Partition(asked, lives), Partition(asked, lives)
    step.add("of one size", first, of_logits)
    step._parts["of one size"].forget()
    step.add("of any size", second, of_logits)
    assert (first.replaced, second.replaced) == (True, False)


@pytest.mark.usefixtures("partitions")
def test_a_part_is_planned_as_one_of_the_model_around_it() -> None:
    torch._dynamo.reset()
    outer = nn.Sequential(nn.Sequential(Block(32), Block(32)), nn.Linear(32, 32))
    outer[0].compile(backend=entry.memrewrite, options={"optimizer": "none", "budget": "1GB"})
    outer(X).mean().backward()
    report: Any = memrewrite.report_of(outer)
    graph, *_ = report.graphs
    assert graph.resident["parameters and buffers"] == sum(-(-p.nbytes // 512) * 512 for p in outer.parameters())


class Wide(nn.Module):
    """Three graphs whose parameters take more than what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(400, 400) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        x = self.second(x).tanh()
        torch._dynamo.graph_break()
        result: Tensor = self.third(x).tanh()
        return result


@pytest.mark.parametrize("budget", ["min", "100%", 12_000_000])
def test_while_the_optimizer_works_batch_and_output_live_and_nothing_that_was_kept(budget: str | int) -> None:
    torch._dynamo.reset()
    model, x = Wide(), torch.randn(100, 400)
    compiled = torch.compile(model, backend=entry.memrewrite, options={"budget": budget, "optimizer": "adamw"})
    for _ in range(3):
        compiled(x).sum().backward()
        model.zero_grad()
    timeline = simulate(model, Inputs((x,), {}), StepSpec(optimizer="adamw").build())
    assert timeline.peak == timeline.peak_of_optimizer
    report: Any = memrewrite.report_of(compiled)
    assert abs(timeline.peak - report.peak) <= 4096  # the loss, which is in no graph, and numbers of the optimizer's


def test_units_that_fully_shard_shards(partitions: list[Partition]) -> None:
    """What lives is a half of all parameters, which the optimizer has, and what is gathered for a graph.

    The third unit runs what was compiled for the second.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Three()
        whole = sum(p.nbytes for p in model.first.parameters())
        for unit in (model.first, model.second, model.third, model):
            fully_shard(unit)
        shard = sum(rounded(local_part(p).untyped_storage().nbytes()) for p in model.first.parameters())
        compiled = torch.compile(model, backend="memrewrite", options={"budget": "60%"})
        compiled(torch.randn(64, 32)).backward()
    finally:
        dist.destroy_process_group()
    lives = [partition.lives for partition in partitions]
    assert [each.later for each in lives] == [2, 1, 0]
    assert {each.gradients for each in lives} == {3 * shard}
    assert len({each.state for each in lives}) == 1
    assert 6 * shard <= lives[0].state <= 6 * shard + 3 * 512 * len([*model.first.parameters()])  # and its counts
    *units, loss = (each.model - 3 * shard for each in lives)
    assert all(whole <= each <= 1.1 * whole for each in units)  # in granules
    assert loss == 0
    assert [each.others for each in lives] == [2 * shard, shard, 0]
    assert [each.transit for each in lives] == [2 * whole, 2 * whole, whole]  # one gathered, and one that is reduced


@pytest.mark.parametrize(
    ("given", "units", "gathered", "reduced"),
    [
        ({}, 3, 2, 4),
        ({"reshard_after_forward": False}, 3, 2 + 3 * 2, 4),  # those that are yet to be gathered stay
        ({}, 0, 2, 0),  # the model is one unit, which is gathered and then reduced
    ],
)
def test_what_units_gather_and_reduce_while_others_compute(
    given: dict[str, Any], units: int, gathered: int, reduced: int
) -> None:
    """In bytes for each parameter of the largest unit but the model itself, whose own wait for nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: Any = Net()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        inner, whole = (sum(p.numel() for p in part.parameters()) for part in (model.layers[0], model))
        sharded = [fully_shard(unit, mp_policy=policy, **given) for unit in [*model.layers[:units], model]]
        model(torch.randn(4, 16))
        for unit in sharded:
            unit.reshard()  # as a step finds them
        of = inner if units else whole
        assert in_transit(model) == (gathered * of, reduced * of)
        if hasattr(model, "set_reduce_scatter_max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(2)
            assert in_transit(model) == (gathered * of, 2 * reduced * of)
    finally:
        dist.destroy_process_group()
