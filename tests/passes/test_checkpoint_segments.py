"""Segments are marked on the nodes of the plan's intervals and nowhere else; what may not run twice is refused."""

import pytest
from torch import fx

from memrewrite.capture import capture
from memrewrite.observe.effects import Effects, observe
from memrewrite.passes.checkpoint_segments import CheckpointSegments
from memrewrite.passes.functionalize import Functionalize
from memrewrite.plan.segments import Plan
from memrewrite.plan_facts.chain import barrier, compute_nodes
from memrewrite.records.errors import InternalError
from tests.support.models import make


def observed(name: str) -> tuple[fx.GraphModule, Effects, list[fx.Node]]:
    model, inputs = make(name)
    graph_module = capture(model, inputs).graph_module
    Functionalize()(graph_module, observe(graph_module, inputs.tensors()))
    effects = observe(graph_module, inputs.tensors())
    return graph_module, effects, compute_nodes(effects)


@pytest.mark.parametrize(
    "intervals", [(), ((0, 2),), ((0, 1), (1, 4), (5, 7))], ids=["empty plan", "one", "neighbours and a gap"]
)
def test_the_nodes_of_each_interval_carry_its_number(intervals: tuple[tuple[int, int], ...]) -> None:
    graph_module, effects, nodes = observed("residual")
    code = graph_module.code
    marks, result = CheckpointSegments(Plan(intervals))(effects)
    expected: list[tuple[int, ...]] = [()] * len(nodes)
    for number, (a, b) in enumerate(intervals):
        expected[a:b] = [(number,)] * (b - a)
    assert list(marks.segments(node.name for node in nodes)) == expected
    assert len(marks.nodes) == sum(b - a for a, b in intervals)
    assert bool(marks) == bool(intervals)
    assert len(result.applied) == len(intervals)
    assert graph_module.code == code


def test_intervals_in_intervals_are_numbered_from_outside_in() -> None:
    _, effects, nodes = observed("residual")
    marks, _ = CheckpointSegments(Plan(((0, 6), (0, 2), (2, 5), (3, 5), (6, 7))))(effects)
    expected = [(0, 0), (0, 0), (0, 1), (0, 1, 0), (0, 1, 0), (0,), (1,)]
    assert list(marks.segments(node.name for node in nodes[:7])) == expected


def test_batch_norm_statistics_and_counters_run_once() -> None:
    _, effects, nodes = observed("residual")
    marks, _ = CheckpointSegments(Plan(((0, len(nodes)),)))(effects)
    counters = [node for node in nodes if marks[node.name].skipped]
    statistics = [node for node in nodes if marks[node.name].once]
    assert len(counters) == len(statistics) == 3
    assert not set(counters) & set(statistics)


def test_random_nodes_are_marked_so_that_their_state_is_kept() -> None:
    _, effects, nodes = observed("swish")
    marks, _ = CheckpointSegments(Plan(((0, len(nodes)),)))(effects)
    assert [marks[node.name].random for node in nodes] == ["dropout" in node.name for node in nodes]


def test_what_may_not_run_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, effects, nodes = observed("residual")
    assert (barrier(effects, nodes) == len(nodes)).all()
    monkeypatch.setattr("memrewrite.passes.checkpoint_segments.barrier", lambda effects, nodes: [1] * len(nodes))
    with pytest.raises(InternalError, match="may not run twice"):
        CheckpointSegments(Plan(((0, 2),)))(effects)
