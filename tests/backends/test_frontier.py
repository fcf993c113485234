"""Where forward is divided, and what of it is never kept."""

from bisect import bisect_right
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from memrewrite.backends.divisions import divisions, may_cut
from memrewrite.backends.frontier import Frontier
from tests.support.divided import Divided

BLOCKS, ROWS, WIDTH, HIDDEN = 7, 64, 32, 256


class Block(nn.Module):
    """A residual MLP, of whose input half is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.turned(self.up(x)).relu())

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[:, HIDDEN // 2 :], x[:, : HIDDEN // 2]), dim=-1)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().sum()


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    divided = Divided(Chain(), "100%", fused=True)
    divided.step(torch.randn(ROWS, WIDTH))
    assert divided.partition.options is not None
    return divided.partition.options.frontier


def test_one_division_is_at_every_block(frontier: Frontier) -> None:
    """Between two blocks only what goes from one to the next is read."""
    known = frontier.facts
    (cuts,) = (cuts for cuts in divisions(known) if len(cuts) == BLOCKS - 1)
    for cut in cuts:
        later = (node for node in range(cut, len(known.nodes)) if known.place[node] == node)
        read = {i for node in later for i in known.inputs[node] if i < cut and i not in known.given}
        assert sum({s: known.bytes[s] for i in read for s in known.holds[i]}.values()) == ROWS * WIDTH * 4


def test_constants_are_made_where_they_are_read(frontier: Frontier) -> None:
    nodes = frontier.facts.nodes
    constants = {i for i, node in enumerate(nodes) if node.target is torch.ops.aten.full.default}
    assert constants
    assert not any(constants & row.last.order.saved for row in frontier.rows)


class Adapted(nn.Module):
    """A residual MLP of frozen weights with adapters, which keep their input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN).requires_grad_(False),
            nn.Linear(HIDDEN, WIDTH).requires_grad_(False),
        )
        self.less, self.more = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down((self.up(x) + self.more(self.less(x))).relu())


class Sum(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().sum()


@pytest.fixture(scope="module")
def adapted() -> Frontier:
    divided = Divided(Sum(*(Adapted() for _ in range(8))), "100%", fused=True)
    divided.step(torch.randn(ROWS, WIDTH))
    assert divided.partition.options is not None
    return divided.partition.options.frontier


def test_the_lowest_peak_is_looked_for_in_regions_that_begin_earlier(adapted: Frontier) -> None:
    """Of adapters two products run again with little kept between; larger budgets have the same plans as without."""
    divided = [row for row in adapted.rows if not row.early]
    assert len(divided) < len(adapted.rows)
    low, lowest = (min(row.lowest.peaks.peak for row in rows) for rows in (divided, adapted.rows))
    assert lowest < low
    for room, early in ((low, 0), (lowest, 1)):
        plan = adapted.within(room)
        assert plan is not None
        assert plan.peaks.peak <= room
        assert plan.order.ways.early == early
    assert adapted.within(lowest - 1) is None


def test_parts_of_backward_are_divided_again_where_they_need_most(adapted: Frontier) -> None:
    row = next(row for row in adapted.rows if len(row.cuts) == 3)
    order = row.last.order
    places = adapted._live.crests(order)
    ends = [*accumulate(len(part.steps) for part in order.parts)]
    assert len({bisect_right(ends, place) for place in places}) == len(places) == len(order.parts)
    again = adapted._cuts_again(row)
    assert {*row.cuts} < {*again}
    assert all(may_cut(adapted.facts, cut) for cut in again)
