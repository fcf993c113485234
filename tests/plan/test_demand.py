"""Segments that a compiler runs again: where they may be divided, and what that takes."""

from dataclasses import replace

import numpy as np
import pytest

from memrewrite.plan.demand import keeping_on_demand, pieces
from memrewrite.plan.dp import flat, lowest_bound, plan
from memrewrite.plan.refine import Search
from memrewrite.plan.segments import Chain, Held, Plan
from memrewrite.plan.tables import NEVER, intervals

WIDE, NARROW, STREAM = 80, 10, 20  # bytes: what the first product of a block makes, the second, and their sum
NODES = 4  # of a block: a product, something light, a product, the sum
BLOCKS = 8


def residual(kept: tuple[int, ...] = (2,), blocks: int = BLOCKS) -> Chain:
    """A first node, then blocks x + product(light(product(x))), of each of which the nodes ``kept`` can be kept."""
    n = 1 + NODES * blocks
    storages = [Held(STREAM, 0, (1, NODES), 1)]
    for start in range(1, n, NODES):
        up, light, down, total = range(start, start + NODES)
        storages += [
            Held(WIDE, up, (light,), light),
            Held(WIDE, light, (down,), down),
            Held(NARROW, down, (total,), total),
            Held(STREAM, total, (up + NODES, total + NODES), up + NODES),
        ]
    storages[-1] = Held(STREAM, n - 1, (n,), None)  # the output
    inside = (np.arange(n) - 1) % NODES
    bytes_of = np.array([WIDE, WIDE, NARROW, STREAM])[inside]

    def own(nodes: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.where(np.isin(inside, nodes) & (np.arange(n) > 0), bytes_of, -1)

    return Chain(
        ms=np.array([10.0, 0.0, 10.0, 0.0])[inside],
        rerun_ms=np.array([0.0, 0.0, 0.0, 0.0])[inside],
        saves=np.ones(n, dtype=np.bool_),
        barrier=np.full(n, n, dtype=np.int64),
        work=np.zeros(n, dtype=np.int64),
        forward=np.zeros(n, dtype=np.int64),
        pending=np.zeros(n, dtype=np.int64),
        storages=tuple(storages),
        segment_ms=0.1,
        save_bytes=(own((0, 2)), own(kept)),
        on_demand=True,
    )


def test_a_segment_is_divided_where_its_branches_end_in_what_is_kept() -> None:
    chain = residual()
    choice = keeping_on_demand(intervals(chain), chain, chain.save_bytes[1])
    assert choice.cuts is not None
    assert choice.cuts.tolist() == [1, *range(NODES, NODES * BLOCKS + 1, NODES)]  # each before the sum of a block
    assert pieces(choice, 4, 16) == [(4, 8), (8, 12), (12, 16)]
    assert pieces(choice, 4, 8) == []


def test_it_is_not_divided_where_products_would_run_again_all_at_once() -> None:
    chain = residual(kept=(0,))
    choice = keeping_on_demand(intervals(chain), chain, chain.save_bytes[1])
    assert choice.cuts is not None
    assert choice.cuts.tolist() == [1]  # a sum is made of what all second products before it make again


@pytest.mark.parametrize("blocks", range(2, BLOCKS))
def test_what_a_divided_segment_takes(blocks: int) -> None:
    """What is kept in all, and for each further block the sum that it starts from."""
    chain = residual()
    usual = intervals(chain)
    choice = keeping_on_demand(usual, chain, chain.save_bytes[1])
    start, end = NODES, NODES * blocks
    assert choice.table.held[start, end] == (blocks - 1) * NARROW + (STREAM if blocks > 1 else 0)
    one = usual.peak[end - NODES, end] - usual.base[end - NODES, end] - NARROW
    sums = (blocks - 2) * STREAM
    assert choice.table.peak[start, end] == usual.base[start, end] + one + (blocks - 1) * NARROW + sums
    assert choice.table.ms[start, end] == 10.0 * (blocks - 1) + chain.segment_ms
    assert not np.isfinite(choice.table.ms[start + 1, end])
    assert choice.table.peak[start + 1, end] == NEVER


def test_plans_keep_what_is_dear_and_narrow() -> None:
    chain = residual()
    with_choices, without = flat(chain), flat(replace(chain, save_bytes=()))
    whole = sum(held.bytes for held in chain.storages)
    assert lowest_bound(with_choices, whole) <= lowest_bound(without, whole)
    found, usual = plan(with_choices, whole // 2), plan(without, whole // 2)
    assert found is not None
    assert usual is not None
    assert found.ms < usual.ms
    assert {chain.save_bytes[0][a] >= 0 and b == a + 1 for a, b in found.keeping} == {True}
    outer = [pair for path, pair in found.numbered() if len(path) == 1]
    assert all(any(a <= p and q <= b for a, b in outer) for p, q in found.keeping)


def test_where_kept_nodes_take_more_than_estimated_there_are_plans_without_them() -> None:
    chain = residual()
    whole = sum(held.bytes for held in chain.storages)
    table = intervals(chain)

    def simulate(candidate: Plan) -> int:
        if candidate.keeping:
            return whole
        return min((int(table.peak[a, b]) for a, b in candidate.intervals), default=whole)

    search = Search(chain, whole, 0, simulate)
    fitted = search.fit(whole // 2)
    assert fitted.fits
    assert fitted.plan.intervals
    assert not fitted.plan.keeping
