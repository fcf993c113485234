"""Parts that are calls in the graph of a model, put in where they run."""

import numpy as np

from memrewrite.plan.segments import Chain, Held, Plan
from memrewrite.plan_facts.nested import Layout, nest


def chain(work: list[int], storages: tuple[Held, ...] = (), gradients: int = 0) -> Chain:
    count = len(work)
    counted = np.array(work, dtype=np.int64)
    return Chain(
        ms=np.ones(count),
        rerun_ms=np.ones(count),
        saves=np.ones(count, dtype=np.bool_),
        barrier=np.full(count, count, dtype=np.int64),
        work=counted,
        forward=counted,
        pending=counted,
        storages=storages,
        segment_ms=0.1,
        gradients=gradients,
    )


# embed, the first layer, the second layer, norm, head; each layer has two nodes
WHOLE = chain(
    [700, 600, 400, 30, 20], (Held(8, 0, (1,), 1), Held(8, 1, (2,), 2), Held(99, 1, (1,), 1), Held(8, 3, (4,), 4))
)
LAYER = chain([5, 6], (Held(40, 0, (1,), 1),), gradients=100)
LAYOUT = Layout(5, ((1, (2,)), (2, (2,))))


def test_nodes_lie_where_they_run() -> None:
    assert LAYOUT.positions == [0, 1, 4, 7, 8, 9]
    plan = Plan(((0, 1), (2, 4), (5, 6), (7, 9)), 3.0, ((7, 9),))
    assert LAYOUT.own(plan) == Plan(((0, 1), (3, 5)), 3.0, ((3, 5),))
    assert LAYOUT.of_parts(plan) == [Plan(((0, 2),), 3.0), Plan(((0, 1),), 3.0)]


def test_no_segment_crosses_a_call() -> None:
    joined = nest(WHOLE, {1: [LAYER], 2: [LAYER]}, {1: 200, 2: 200}, 50)
    assert joined.barrier.tolist() == [1, 1, 4, 4, 4, 7, 7, 9, 9]


def test_gradients_are_those_that_are_left_of_them() -> None:
    joined = nest(WHOLE, {1: [LAYER], 2: [LAYER]}, {1: 200, 2: 200}, 50)
    assert joined.work.tolist() == [500, 0, 155, 156, 0, 55, 56, 30, 20]


def test_what_a_part_keeps_to_itself_is_its_own() -> None:
    joined = nest(WHOLE, {1: [LAYER], 2: [LAYER]}, {1: 200, 2: 200}, 50)
    assert joined.storages == (
        Held(8, 0, (1,), 1),
        Held(40, 2, (3,), 3),
        Held(8, 3, (4,), 4),
        Held(40, 5, (6,), 6),
        Held(8, 7, (8,), 8),
    )


def test_a_call_may_run_several_parts_one_after_the_other() -> None:
    layout = Layout(5, ((2, (2, 3)),))
    assert layout.positions == [0, 1, 2, 9, 10, 11]
    plan = Plan(((0, 2), (3, 5), (6, 9)), 3.0)
    assert layout.own(plan) == Plan(((0, 2),), 3.0)
    assert layout.of_parts(plan) == [Plan(((0, 2),), 3.0), Plan(((0, 3),), 3.0)]
    joined = nest(WHOLE, {2: [LAYER, chain([7, 8, 9])]}, {2: 300}, 50)
    assert len(joined) == layout.positions[-1]
    assert joined.barrier.tolist() == [2, 2, 2, 5, 5, 5, 9, 9, 9, 11, 11]
