"""``memrewrite.report_of`` what the back end compiled: each graph, in numbers and in words."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.backends import entry
from memrewrite.backends.asked import Asked
from memrewrite.backends.observed import Seen
from memrewrite.backends.partition import Partition
from memrewrite.backends.told import Noted
from memrewrite.records.compiled import CHOICES, CompiledGraph, CompiledReport
from memrewrite.records.errors import UsageError
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.torch_internals.compiling import backend_of_frame
from tests.backends.test_entry import Broken
from tests.backends.test_partition import Block, mlp
from tests.support.divided import NOTHING

OPTIONS: dict[str, Any] = {"budget": "min", "optimizer": "sgd"}


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=entry.memrewrite, options=options or OPTIONS)


def step(model: Callable[..., Tensor], rows: int = 256) -> None:
    model(torch.randn(rows, 32)).backward()


def test_a_graph_is_told_as_it_was_planned(partitions: list[Partition]) -> None:
    model = compiled(mlp(), budget="min", optimizer="adamw", reserve="1MB", exact=True)
    step(model)
    report = memrewrite.report_of(model)
    assert isinstance(report, CompiledReport)
    asked = (report.model, report.budget, report.optimizer, report.reserve, report.exact)
    assert asked == ("Loss", "min", "adamw", 10**6, True)
    (graph,), (partition,) = report.graphs, partitions
    foreseen = partition.foreseen
    assert foreseen is not None
    assert (graph.name, graph.choice) == ("Loss", "lowest")
    assert (report.peak, graph.peak_before) == (foreseen.after, foreseen.before)
    assert graph.kept == sum(graph.kept_by.values()) == foreseen.kept < foreseen.kept_before
    assert graph.resident["parameters and buffers"] == partition.lives.model
    assert graph.reruns["addmm"] > 0
    assert graph.regions > 1
    assert graph.rerun_ms > 0


@pytest.mark.parametrize(
    ("options", "choice"),
    [({"budget": "1GB"}, "usual"), ({"budget": "85%", "optimizer": "none"}, "cheapest"), ({"reserve": 0}, "no budget")],
    ids=["usual", "cheapest", "no budget"],
)
@pytest.mark.usefixtures("partitions")
def test_ways_a_graph_is_divided(options: dict[str, Any], choice: str) -> None:
    model = compiled(mlp(), **options)
    step(model)
    report = memrewrite.report_of(model)
    (graph,) = report.graphs
    assert graph.choice == choice
    assert (report.peak is None) == (choice == "no budget")
    assert ("addmm" in graph.reruns) == (choice == "cheapest")


@pytest.mark.usefixtures("partitions")
def test_a_graph_without_backward() -> None:
    model = compiled(mlp())
    with torch.no_grad():
        model(torch.randn(4, 32))
    report = memrewrite.report_of(model)
    assert [graph.choice for graph in report.graphs] == ["no backward"]
    assert report.peak is None
    step(model)
    report = memrewrite.report_of(model)
    assert [graph.choice for graph in report.graphs] == ["no backward", "lowest"]
    assert report.peak is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, where it resumes
@pytest.mark.usefixtures("partitions")
def test_breaks_and_lengths_make_graphs() -> None:
    model = compiled(Broken())
    for rows, count in ((256, 2), (128, 4), (64, 4)):
        step(model, rows)
        assert len(memrewrite.report_of(model).graphs) == count
    report = memrewrite.report_of(model)
    assert report.peak == max(graph.peak or 0 for graph in report.graphs)
    assert "kept by what ran before" in report.graphs[1].resident
    again = compiled(model._orig_mod)
    step(again)
    assert memrewrite.report_of(again) == report  # Dynamo has shared them
    torch._dynamo.reset()
    with pytest.raises(UsageError, match="has not run yet"):
        memrewrite.report_of(model)


@pytest.mark.usefixtures("partitions")
def test_models_are_told_apart() -> None:
    first, second = mlp(2), mlp(3)
    one, other = compiled(first), compiled(second)
    step(one)
    with pytest.raises(UsageError, match=r"This Loss has not run yet.*ask after the first step"):
        memrewrite.report_of(other)
    step(other)
    assert len(memrewrite.report_of(one).graphs) == len(memrewrite.report_of(other).graphs) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
@pytest.mark.usefixtures("partitions")
def test_a_copy_of_a_compiled_model_has_graphs_of_its_own(copied: Callable[[Any], Any]) -> None:
    first = torch.compile(mlp(), backend="memrewrite", options=OPTIONS)
    step(first)
    second = copied(first)
    with pytest.raises(UsageError, match=r"has not run yet"):
        memrewrite.report_of(second)
    second(torch.randn(8, 32, 32)).backward()
    assert len(memrewrite.report_of(first).graphs) == len(memrewrite.report_of(second).graphs) == 1


@pytest.mark.usefixtures("partitions")
def test_modules_in_place_and_functions() -> None:
    model = mlp(2)
    model.compile(backend=entry.memrewrite, options=OPTIONS)
    step(model)
    report: Any = memrewrite.report_of(model)
    assert (report.model, len(report.graphs)) == ("Loss", 1)
    inner = mlp(2)

    def loss(x: Tensor) -> Tensor:
        result: Tensor = inner(x)
        return result

    function = torch.compile(loss, backend=entry.memrewrite, options=OPTIONS)
    step(function)
    assert memrewrite.report_of(function).model == "loss"


class OfParts(nn.Module):
    """A method of it is compiled where it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(2)

    def forward(*args: Any) -> Tensor:  # as decorators of methods have it
        self, x = args
        result: Tensor = self.inner(x)
        return result

    @torch.compile(backend=entry.memrewrite, options=OPTIONS)
    def loss(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Decorated(OfParts):
    forward = OfParts.loss


@pytest.mark.usefixtures("partitions")
def test_methods_that_are_compiled() -> None:
    for made, of in ((OfParts().loss, "loss"), (Decorated(), "Decorated"), (Decorated().forward, "loss")):
        step(made)
        assert memrewrite.report_of(made).model == of
        torch._dynamo.reset()
    model = mlp(2)
    model.forward = compiled(model.forward)  # type: ignore[arg-type, method-assign]
    step(model)
    report: Any = memrewrite.report_of(model)
    assert (report.model, [graph.name for graph in report.graphs]) == ("Loss", ["Loss"])
    model.forward = torch.compile(mlp(2).forward, backend="eager")  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="This Loss is compiled by backend 'eager', of which"):
        memrewrite.report_of(model)


@pytest.mark.usefixtures("partitions")
def test_a_forward_that_names_no_self_is_of_its_module() -> None:
    model = compiled(OfParts())
    step(model)
    assert [graph.name for graph in memrewrite.report_of(model).graphs] == ["OfParts"]


@pytest.mark.usefixtures("partitions")
def test_a_model_whose_forward_is_pytorchs_own_has_its_name() -> None:
    model = compiled(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), mlp(1)), budget="1GB")
    words = "^Sequential was compiled 1 times"
    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(BeyondPlanWarning, match=words):
        step(model)
    assert [graph.name for graph in memrewrite.report_of(model).graphs] == ["Sequential"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.usefixtures("partitions")
def test_a_model_of_compiled_parts() -> None:
    """Parts of one class share what Dynamo has compiled for the first of them."""
    model = nn.Sequential(*(Block(32) for _ in range(2)), mlp(2))
    for block in model:
        block.compile(backend=entry.memrewrite, options=OPTIONS)
    step(model)
    report: Any = memrewrite.report_of(model)
    assert report.model == "Sequential"
    names = [graph.name for graph in report.graphs]
    assert names == ["Block", "Block", "Loss"]


def test_what_the_back_end_did_not_compile() -> None:
    model = mlp(1)
    with pytest.raises(UsageError, match="compiled by backend 'inductor', of which there is no report"):
        memrewrite.report_of(torch.compile(model))
    with pytest.raises(UsageError, match="compiled by backend 'eager'"):
        memrewrite.report_of(torch.compile(model, backend="eager"))
    for other in (model, len, lambda x: x):
        with pytest.raises(UsageError, match=r"has no report; it is not what memrewrite\.optimize returned, nor"):
            memrewrite.report_of(other)


GRAPH = CompiledGraph(
    name="Net",
    choice="cheapest",
    resident={"parameters and buffers": 10**9, "inputs": 10**6},
    peak=2 * 10**9,
    peak_before=3 * 10**9,
    kept=5 * 10**8,
    kept_before=15 * 10**8,
    kept_by={"addmm": 5 * 10**8},
    reruns={"addmm": 3, "relu": 2},
    regions=4,
    rerun_ms=1.5,
)
TEXT = """\
Net by torch.compile: budget 2.50 GB, optimizer adamw, foreseen peak 2.00 GB
graph 1, Net: the cheapest plan found that fits
  resident     parameters and buffers 1.00 GB, inputs 1.0 MB
  peak         2.00 GB (PyTorch 3.00 GB foreseen)
  kept         500.0 MB (PyTorch 1.50 GB): addmm 500.0 MB
  runs again   3 addmm, 2 relu; 4 regions, 1.50 ms"""


def test_as_text_and_as_data() -> None:
    report = CompiledReport("Net", "2.50 GB", "adamw", 0, 0, False, (GRAPH,))
    assert str(report) == TEXT
    data = json.loads(json.dumps(report.to_json()))
    assert (data["schema_version"], data["peak"]) == (1, 2 * 10**9)
    assert data["graphs"][0]["kept_by"] == {"addmm": 5 * 10**8}
    unseen, usual = replace(GRAPH, unseen="no fake rule"), replace(GRAPH, choice="usual")
    for graph, told in ((unseen, "2.00 GB (PyTorch 3.00 GB)"), (usual, "2.00 GB")):
        assert f"  peak         {told}\n" in str(CompiledReport("Net", "2.50 GB", "adamw", 0, 0, False, (graph,)))
    lost = CompiledReport("Net", "", "none", 0, 0, False, (GRAPH, CompiledGraph("Net", "from cache", {})))
    assert lost.peak is None
    assert str(lost).splitlines()[0] == "Net by torch.compile: no budget, optimizer none, peak not foreseen"
    assert str(lost).splitlines()[-1] == f"graph 2, Net: {CHOICES['from cache']}"


@pytest.mark.parametrize(("budget", "choice"), [(None, "no budget"), ("min", "from cache")], ids=["none", "min"])
def test_of_a_graph_from_a_cache_it_is_known_whether_a_budget_chose(budget: str | None, choice: str) -> None:
    partition = Partition(Asked.parse({"budget": budget})[0], NOTHING)
    partition.observe(Seen(1000, 0), cached=True)
    assert Noted(0, partition, "Net", lambda: None, True, lambda: None).told().choice == choice


def test_outside_of_dynamo_nothing_is_noted() -> None:
    assert backend_of_frame() is None
