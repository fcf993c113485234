"""The stretch of the line where only fake tensors run: what it may skip, and that it notices when it may not."""

from unittest import mock

import pytest
import torch

import memrewrite
from memrewrite.observe import effects
from memrewrite.plan.segments import Plan
from memrewrite.plan_facts.chain import compute_nodes_of
from memrewrite.records.loop import HABITS, Loop
from memrewrite.search import pipeline
from memrewrite.search.regions import find
from memrewrite.workload.step import OptimizerFactory, Step
from tests.support.models import make

OPTIMIZERS: dict[str, OptimizerFactory | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,  # has its state before the first step
}


def line(name: str, step: Step) -> pipeline.Line:
    model, inputs = make(name)
    parts = [pipeline.Part(region, step) for region in find(model, inputs, step).found]
    return pipeline.Line(model, inputs, step, 4096, parts)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["residual", "transformer", "tied"])
def test_one_pass_tells_the_peak_of_two_steps(name: str, optimizer: str) -> None:
    under_test = line(name, Step(optimizer=OPTIMIZERS[optimizer]))
    usual = under_test.simulate()
    n = len(compute_nodes_of(under_test.parts[0].graph_module))
    for plan in (Plan(), Plan(((0, n // 2),)), Plan(((0, n // 3), (n // 3, n - 1)))):
        under_test.segments(plan)
        assert under_test.rehearse(usual) == under_test.simulate().peak


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("loop", [*HABITS, "prefetch,scaler,ema,zero-before-backward"])
@pytest.mark.parametrize("name", ["residual", "tied"])
def test_one_pass_tells_the_peak_of_every_loop(name: str, loop: str, micro_batches: int) -> None:
    step = Step(optimizer=torch.optim.AdamW, loop=Loop.parse(loop), micro_batches=micro_batches)
    under_test = line(name, step)
    usual = under_test.simulate()
    n = len(compute_nodes_of(under_test.parts[0].graph_module))
    for plan in (Plan(), Plan(((0, n // 2),)), Plan(((0, n // 3), (n // 3, n - 1)))):
        under_test.segments(plan)
        assert under_test.rehearse(usual) == under_test.simulate().peak


def test_a_graph_is_observed_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = mock.Mock(wraps=effects.observe)
    monkeypatch.setattr(pipeline, "observe", observed)
    under_test = line("swish", Step())
    (part,) = under_test.parts
    first = part.observe()
    under_test.segments(Plan(((0, 3),)))
    assert part.observe() is first
    observed.assert_called_once()
    pipeline.rewrite(under_test, None, exact=False)
    assert part.observe() is not first
    assert set(part.observe().order) == set(part.graph_module.graph.nodes)


@pytest.mark.parametrize(("times", "kept"), [(None, True), ((5.0, 3.0), True), ((3.0, 5.0), False)])
def test_statistics_are_kept_where_the_device_takes_longer(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float] | None, kept: bool
) -> None:
    monkeypatch.setattr(pipeline, "kernel_runs_on", lambda device: True)
    under_test = line("residual", Step())
    under_test.original = times
    (part,) = under_test.parts
    n = len(compute_nodes_of(part.graph_module))
    under_test.segments(Plan(((0, n // 2),)))
    assert ("normalize(" in part.source) == under_test.statistics == kept


def test_a_peak_that_one_pass_does_not_tell_is_found_by_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make("residual")
    monkeypatch.setattr(pipeline.Line, "rehearse", lambda self, usual, spare: usual.peak // 4)
    budget = memrewrite.optimize(model, inputs.args, budget="min", verify=False).report.predicted_after.peak
    result = memrewrite.optimize(model, inputs.args, budget=budget, verify=False)
    assert result.report.predicted_after.peak <= budget
    assert result.report.segments
