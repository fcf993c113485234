"""Candidates, where only fake tensors run: what may be skipped, that it shows when it may not; that none changes."""

from dataclasses import replace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

import memrewrite
from memrewrite.codegen.writer import generate
from memrewrite.observe import effects
from memrewrite.observe.any_gradient import observe_trained
from memrewrite.observe.effects import Effects
from memrewrite.plan.segments import Plan
from memrewrite.records.errors import InternalError
from memrewrite.records.loop import HABITS, Loop
from memrewrite.records.options import Budget
from memrewrite.rewriting.contract import Applied, Result
from memrewrite.search import fit_to_budget, graphs, inplace
from memrewrite.search.asked import Asked, Fit, Unmet
from memrewrite.search.bench import Bench
from memrewrite.search.candidate import Candidate
from memrewrite.search.inplace import marked_inplace
from memrewrite.search.planning import plan, promised, rewritten
from memrewrite.simulate.memory.course import Noting
from memrewrite.targets.eager import Target
from memrewrite.workload.optimizers import OptimizerFactory
from memrewrite.workload.step import Inputs, Step
from tests.support.dropins import candidate
from tests.support.models import make

OPTIMIZERS: dict[str, OptimizerFactory | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,  # has its state before the first step
}
BOTH = ["tiles", "attention_in_pieces"]


def first(name: str, step: Step) -> Candidate:
    return candidate(*make(name), step, workspace=4096)


def some_plans(under_test: Candidate) -> list[Plan]:
    n = len(under_test.regions[0].graph.nodes)
    return [Plan(), Plan(((0, n // 2),)), Plan(((0, n // 3), (n // 3, n - 1)))]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["residual", "transformer", "tied"])
def test_one_pass_tells_the_peak_of_two_steps(name: str, optimizer: str) -> None:
    under_test = first(name, Step(optimizer=OPTIMIZERS[optimizer]))
    usual = under_test.simulate()
    for segments in some_plans(under_test):
        planned = under_test.with_segments(segments)
        assert planned.rehearse(usual) == planned.simulate().peak


@pytest.mark.parametrize("name", ["residual", "transformer", "tied"])
def test_what_is_simulated_without_making_the_drop_in_is_what_the_drop_in_does(name: str) -> None:
    under_test = first(name, Step(optimizer=torch.optim.AdamW))
    for segments in some_plans(under_test):
        planned = under_test.with_segments(segments).promising(10**9, strict=True)
        made = planned.bench.predict(planned.build(), attribute=True)
        assert planned.attributed() == made
        assert planned.simulate().events == made.events


@pytest.mark.parametrize("loop", ["tutorial", "drop-output", "zero-before-backward", "ema,prefetch,scaler"])
def test_peaks_in_other_loops_and_submodules_are_those_of_steps_that_run(loop: str) -> None:
    """Where what the candidate's passes do is known from before."""
    step = Step(optimizer=torch.optim.AdamW, loop=Loop.parse(loop))
    planned = first("residual", step).with_segments(Plan(((0, 3),)))
    planned.simulate()
    marked = planned.making_room(4096).promising(10**9, strict=False)
    result = marked.build()
    with mock.patch.object(Noting, "_note", side_effect=AssertionError):
        assert marked.attributed() == planned.bench.predict(planned.build(), attribute=True)
    for habit in HABITS:
        other = replace(step, loop=Loop.parse(habit))
        assert marked.peak_of(result, other) == planned.bench.predict(planned.build(), other).peak


def test_one_pass_tells_that_a_candidate_is_clearly_above_its_budget() -> None:
    under_test = first("residual", Step(optimizer=torch.optim.AdamW))
    usual = under_test.simulate()
    planned = under_test.with_segments(Plan(((0, 3),)))
    above, limit = planned.rehearse(usual), Budget(bytes=1)
    asked = Asked(under_test.bench, limit, above // 2, usual.peak, None)
    assert asked.exceeded_by(planned)
    assert not planned.bench.has_simulated(planned.programs)
    assert replace(asked, budget=above - 1).exceeded_by(planned)
    assert not replace(asked, budget=above).exceeded_by(planned)
    assert planned.bench.has_simulated(planned.programs)


def test_that_the_lowest_peak_is_wanted_is_not_simulated() -> None:
    under_test = first("residual", Step())
    asked = Asked(under_test.bench, Budget(minimum=True), 0, 1, None)
    with mock.patch.object(Candidate, "simulate", side_effect=AssertionError):
        assert asked.exceeded_by(under_test)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("loop", [*HABITS, "prefetch,scaler,ema,zero-before-backward"])
@pytest.mark.parametrize("name", ["residual", "tied"])
def test_one_pass_tells_the_peak_of_every_loop(name: str, loop: str, micro_batches: int) -> None:
    step = Step(optimizer=torch.optim.AdamW, loop=Loop.parse(loop), micro_batches=micro_batches)
    under_test = first(name, step)
    usual = under_test.simulate()
    for segments in some_plans(under_test):
        planned = under_test.with_segments(segments)
        assert planned.rehearse(usual) == planned.simulate().peak


def test_a_graph_is_observed_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = mock.Mock(wraps=effects.observe)
    monkeypatch.setattr(graphs, "observe", observed)
    under_test = first("swish", Step())
    seen = under_test.regions[0].effects
    planned = under_test.with_segments(Plan(((0, 3),)))
    assert planned.regions[0].effects is seen
    observed.assert_called_once()
    after = rewritten(under_test, None, exact=False)
    assert after.regions[0].effects is not seen
    assert after.regions[0].effects.order == tuple(after.regions[0].graph.graph_module.graph.nodes)


def test_a_program_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    under_test = first("swish", Step())
    written = mock.Mock(wraps=generate)
    monkeypatch.setattr(graphs, "generate", written)
    for _ in range(2):
        planned = under_test.with_segments(Plan(((0, 3),)))
        assert planned.programs != planned.without_segments().programs == under_test.programs
        assert planned.making_room(4096).programs != planned.programs
    assert written.call_count == 3


class Lying:
    """Changes the graph or not, and says the opposite."""

    name: ClassVar[str] = "lying"
    exact: ClassVar[bool] = True

    def __init__(self, does: str) -> None:
        self.does = does

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        node = next(node for node in effects.order if node.op == "call_function")
        if self.does == "replaces":
            node.target = torch.ops.aten.relu.default
        if self.does == "rearranges":
            node.args = (*node.args, None)
        if self.does == "adds":
            graph_module.graph.create_node("call_function", torch.ops.aten.relu.default, (node,))
        if self.does == "removes":
            graph_module.graph.erase_node(effects.order[-1])
        return Result((Applied("", ""),)) if self.does == "nothing" else Result()


@pytest.mark.parametrize("does", ["nothing", "replaces", "rearranges", "adds", "removes"])
def test_what_a_pass_says_of_itself_is_held_against_the_graph(does: str) -> None:
    (region,) = first("swish", Step()).regions
    with (
        mock.patch.object(fx.Graph, "lint"),
        pytest.raises(InternalError, match=f"lying says modified={does == 'nothing'}; the graph says"),
    ):
        region.after(Lying(does))


@pytest.mark.parametrize("name", ["swish", "residual"])
def test_no_pass_and_no_plan_changes_what_it_is_given(name: str) -> None:
    captured = first(name, Step())
    (region,) = captured.regions
    code, source = region.graph.graph_module.code, region.source
    values = [str(node.meta.get("val")) for node in region.effects.order]
    after = rewritten(captured, None, exact=False)
    low = captured.simulate().floor
    planned = plan(after, low).candidate
    marked = marked_inplace(planned, None)
    assert len({captured.programs, planned.programs, marked.programs}) == 3
    assert region.graph.graph_module.code == region.region.captured.graph_module.code == code
    assert replace(region, results={}).source == region.source == source
    assert [str(node.meta.get("val")) for node in region.effects.order] == values
    assert planned.without_segments().programs == after.programs
    assert [node.name for node in marked.regions[0].graph.nodes] == [n.name for n in after.regions[0].graph.nodes]


@pytest.mark.parametrize(("times", "kept"), [(None, True), ((5.0, 3.0), True), ((3.0, 5.0), False)])
def test_statistics_are_kept_where_the_device_takes_longer(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float] | None, kept: bool
) -> None:
    monkeypatch.setattr(Target, "normalizes_by_kernel", lambda target, device: True)
    under_test = first("residual", Step())
    under_test = replace(under_test, bench=replace(under_test.bench, original=times))
    n = len(under_test.regions[0].graph.nodes)
    (source,) = under_test.with_segments(Plan(((0, n // 2),))).programs
    assert ("normalize(" in source) == under_test.bench.statistics == kept


def test_a_peak_that_one_pass_does_not_tell_is_found_by_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make("residual")
    monkeypatch.setattr(Candidate, "rehearse", lambda self, usual, spare: usual.peak // 4)
    budget = memrewrite.optimize(model, inputs.args, budget="min", verify=False).report.predicted_after.peak
    result = memrewrite.optimize(model, inputs.args, budget=budget, verify=False)
    assert result.report.predicted_after.peak <= budget
    assert result.report.segments


@pytest.mark.parametrize(("between", "looks"), [(torch.nn.SiLU, False), (torch.nn.ELU, False), (torch.nn.ReLU, True)])
def test_what_autograd_would_keep_is_looked_at_where_it_decides_about_activations(
    between: type[torch.nn.Module], looks: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), between(), torch.nn.Linear(4, 4))
    under_test = candidate(model, Inputs((torch.randn(2, 4),), {}), Step(optimizer=None))
    with mock.patch.object(inplace, "observe_trained", wraps=observe_trained) as observed:
        found = marked_inplace(under_test, None)
    assert observed.called == looks
    with mock.patch.multiple(inplace, is_activation=lambda node: True, unsupported=lambda node: None):
        looked = marked_inplace(under_test, None)
    assert (found.programs, found.results) == (looked.programs, looked.results)


class AsWide(torch.nn.Module):
    """Casts what it weighs with to the type of what is weighed, which is that of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        value = self.second(self.first(x).relu())[None]
        weights = torch.softmax(value.float(), -1).to(value.dtype)
        return weights @ value


def test_a_program_for_autocast_alone_is_looked_at_under_autocast() -> None:
    step = Step(optimizer=None, amp=torch.bfloat16)
    found = marked_inplace(candidate(AsWide(), Inputs((torch.randn(8, 8),), {}), step), None)
    done = found.regions[0].results["inplace_activation"]
    assert len(done.applied) == 1
    assert not done.refused


@pytest.mark.parametrize(
    ("times", "taken", "looked_for"),
    [
        ({}, "attention_in_pieces", ["attention_in_pieces"]),
        ({"both": 2.0, "tiles": 1.0, "attention_in_pieces": 1.0}, "attention_in_pieces", BOTH),
        ({"both": 2.0, "tiles": 1.0, "attention_in_pieces": 3.0}, "tiles", BOTH),
        ({"both": 1.0, "tiles": 3.0, "attention_in_pieces": 2.0}, "both", BOTH),
    ],
)
def test_fewer_of_the_rewrites_for_the_lowest_peak(
    times: dict[str, float], taken: str, looked_for: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def made(name: str) -> mock.Mock:
        ms = times.get(name)
        return mock.Mock(programs=(name,), times=lambda: None if ms is None else (ms, ms))

    made_of = {name: made(name) for name in ("none", "both", *BOTH)}

    def found(asked: object, lower: Candidate) -> Fit:
        looked.extend(lower.programs)
        return Fit(lower, None, lower, 0)

    def lowest(candidate: Candidate, names: tuple[str, ...]) -> mock.Mock:
        return made_of["tiles" if "tiles" in names else "attention_in_pieces"]

    monkeypatch.setattr(fit_to_budget, "rewritten_lowest", lowest)
    monkeypatch.setattr(fit_to_budget, "_found", found)
    monkeypatch.setattr(fit_to_budget, "promises_below", lambda candidate, size: size == 995)
    asked, both = mock.Mock(names=None), made_of["both"]
    fit = fit_to_budget._with_fewer(asked, made_of["none"], Fit(both, None, both, 0), bar=1000)
    assert fit.candidate is made_of[taken]
    assert looked == looked_for


@pytest.mark.parametrize(
    ("lowest", "optimizer", "as_it_is", "promise", "looked_for"),
    [
        (1000, 1000, 2000, 900, ["lower"]),
        (1004, 1000, 2000, 900, ["lower"]),
        (1010, 1000, 2000, 1004, ["lower", "plain"]),
        (1010, 1000, 2000, 1006, ["lower"]),
        (1000, 1000, 1000, 1000, ["lower", "plain"]),
    ],
)
def test_no_plan_without_rewrites_is_looked_for_where_the_optimizer_or_its_promise_takes_more(
    lowest: int, optimizer: int, as_it_is: int, promise: int, looked_for: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def found(asked: object, each: Candidate) -> Fit:
        looked.extend(each.programs)
        return Fit(each, None, each, 0)

    timeline = mock.Mock(peak=lowest, peak_of_optimizer=optimizer)
    plain, lower = (
        mock.Mock(programs=(name,), simulate=mock.Mock(return_value=timeline)) for name in ("plain", "lower")
    )
    plain.rehearse.return_value = as_it_is
    asked = mock.Mock()
    monkeypatch.setattr(fit_to_budget, "_bytes", lambda asked: lambda found: (False, lowest))
    monkeypatch.setattr(fit_to_budget, "_lower_ones", lambda asked, candidate: [candidate])
    monkeypatch.setattr(fit_to_budget, "rewritten_lowest", lambda candidate, names: lower)
    monkeypatch.setattr(fit_to_budget, "rewritten_slower", lambda candidate, names: candidate)
    monkeypatch.setattr(fit_to_budget, "promised", lambda candidate: lowest)
    monkeypatch.setattr(fit_to_budget, "promises_below", lambda candidate, size: promise < size)
    monkeypatch.setattr(fit_to_budget, "_found", found)
    monkeypatch.setattr(fit_to_budget, "_told", lambda found, lower: found)
    best = fit_to_budget._lowest(asked, plain)
    assert looked == looked_for
    assert best.candidate.programs == (looked_for[-1],)


@pytest.mark.parametrize(
    ("promises", "taken"),
    [({"wide": 1000, "narrow": 996}, "wide"), ({"wide": 1000, "narrow": 994}, "narrow")],
)
def test_of_two_candidates_the_one_is_planned_that_promises_less(
    promises: dict[str, int], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_to_budget, "promised", promises.__getitem__)
    assert fit_to_budget._most_promising(["wide", "narrow"]) == taken  # type: ignore[comparison-overlap, list-item]


@pytest.mark.parametrize(
    ("promises", "looked_for"),
    [
        ({"wide": 990, "narrow": 986, "wide+": 900}, ["plain", "wide", "wide+"]),
        ({"wide": 990, "narrow": 900, "wide+": 900}, ["plain", "wide", "narrow", "wide+"]),
        ({"wide": 996, "narrow": 992, "wide+": 996, "narrow+": 996}, ["plain", "wide", "plain"]),
    ],
)
def test_what_promises_no_less_than_was_reached_is_not_planned(
    promises: dict[str, int], looked_for: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each without a fit but the last, after the rewrites for the lowest peak (+)."""
    looked: list[str] = []
    plain, wide, narrow = (mock.Mock(programs=(name,)) for name in ("plain", "wide", "narrow"))

    def found(asked: object, each: mock.Mock) -> Fit | Unmet:
        looked.extend(each.programs)
        lowest = {"plain": 1000, "wide": 988, "narrow": 905}
        (name,) = each.programs
        return Unmet(each, lowest[name], given_up=name == "plain") if name in lowest else Fit(each, None, each, 0)

    monkeypatch.setattr(fit_to_budget, "_found", found)
    monkeypatch.setattr(fit_to_budget, "_lower_ones", lambda asked, candidate: [wide, narrow])
    lowest = {name: mock.Mock(programs=(name,)) for name in ("wide+", "narrow+")}
    monkeypatch.setattr(fit_to_budget, "rewritten_lowest", lambda less, names: lowest[f"{less.programs[0]}+"])
    monkeypatch.setattr(fit_to_budget, "promised", lambda each: promises[each.programs[0]])
    monkeypatch.setattr(fit_to_budget, "promises_below", lambda each, size: promises[each.programs[0]] < size)
    monkeypatch.setattr(fit_to_budget, "rewritten_slower", lambda each, names: each)
    monkeypatch.setattr(fit_to_budget, "_with_fewer", lambda asked, less, found, bar: found)
    monkeypatch.setattr(fit_to_budget, "_told", lambda found, lower: found)
    plain.regions = ()
    asked = mock.Mock(may_checkpoint=True, limit=mock.Mock(minimum=False), budget=800)
    fit_to_budget._with_lower(asked, plain)
    assert looked == looked_for


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_the_estimate_promises_about_what_the_lowest_plan_takes(name: str) -> None:
    under_test = first(name, Step(optimizer=torch.optim.AdamW))
    lowest = plan(under_test, 0).fitted.peak
    assert promised(under_test) == pytest.approx(lowest, rel=0.02)


def test_nothing_is_simulated_where_one_node_alone_takes_more_than_would_do() -> None:
    under_test = first("residual", Step(optimizer=torch.optim.AdamW))
    usual = under_test.simulate(blocks=False)
    with mock.patch.object(Bench, "predict") as predict:
        far = plan(under_test, 0, hopeless=usual.floor / 2)
    predict.assert_not_called()
    assert (far.given_up, far.fitted.peak, far.candidate) == (True, usual.peak, under_test)
    assert not plan(under_test, 0, hopeless=usual.peak).given_up
