"""Where forward is divided, what of it is never kept, and which plans there are for a division."""

import sys
from bisect import bisect_right
from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from memrewrite.backends.divisions import divisions, may_cut
from memrewrite.backends.frontier import _TRIES, Frontier, _Between, _Row
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


def frontier_of(model: nn.Module, x: Tensor) -> Frontier:
    divided = Divided(model, "100%", fused=True)
    divided.step(x)
    assert divided.partition.options is not None
    return divided.partition.options.frontier


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return frontier_of(Chain(), torch.randn(ROWS, WIDTH))


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
    return frontier_of(Sum(*(Adapted() for _ in range(8))), torch.randn(ROWS, WIDTH))


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


class Shifted(nn.Module):
    """A residual MLP that adds what is far from the product that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shift, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift(x)
        for _ in range(40):
            shift = -shift
        return x + self.down(-self.up(x) + shift)


@pytest.fixture(scope="module")
def shifted() -> Frontier:
    return frontier_of(Sum(*(Shifted() for _ in range(8))), torch.randn(32 * ROWS, WIDTH))


def of_blocks(frontier: Frontier) -> _Row:
    """The plans of the division between eight blocks."""
    (cuts,) = (cuts for cuts in divisions(frontier.facts) if len(cuts) == 7)
    return _Row(frontier, cuts)


def test_each_step_frees_what_is_kept_however_far_it_is_from_what_it_is_made_of(shifted: Frontier) -> None:
    row = of_blocks(shifted)
    *saved, _ = (each.peaks.saved for each in row.all)
    assert sum(less < more for more, less in pairwise(saved)) >= 7
    assert saved[-1] < saved[0] / 4


def test_what_the_last_plan_gives_is_taken_back_where_there_is_room(shifted: Frontier) -> None:
    with mock.patch.object(_Row, "_next", return_value=frozenset()):
        row = of_blocks(shifted)
        most, least = row.all
    room = (most.peaks.peak + least.peaks.peak) // 2
    found = row.between(1, room, room)
    while found.ahead:
        found.go_on()
    assert least.peaks.peak < found.best.peaks.peak <= room
    assert found.best.ms < least.ms


def test_the_cheapest_rows_alone_take_back_more_than_a_little(shifted: Frontier) -> None:
    tried: list[_Between] = []

    def go_on(self: _Between) -> None:
        if self.ahead:
            tried.append(self)
        wholly(self)

    wholly = _Between.go_on
    with mock.patch.object(_Row, "_next", return_value=frozenset()), mock.patch.object(_Between, "go_on", go_on):
        rows = [_Row(shifted, cuts) for cuts in divisions(shifted.facts)]
        most, least = of_blocks(shifted).all
        best = shifted._cheapest(rows, (most.peaks.peak + least.peaks.peak) // 2, sys.maxsize, lambda division: 0)
    times = {id(each): tried.count(each) for each in tried}
    assert best == min((each.best for each in tried), key=lambda each: each.rank)
    assert 0 < sum(count > _TRIES for count in times.values()) < len(times)


class Level(nn.Module):
    """A level of a U-Net and those below it."""

    def __init__(self, width: int, below: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.below = Level(2 * width, below - 1) if below else None
        self.sink = nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.rise = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.second(nn.functional.silu(self.first(x))))
        if self.below is None:
            return x
        risen = self.rise(self.below(self.sink(x)))
        return nn.functional.silu(self.join(torch.cat((x, risen), 1)))


def test_what_would_live_at_the_peak_if_it_ran_again_is_kept_while_others_need_not_be() -> None:
    frontier = frontier_of(Sum(Level(8, below=3)), torch.randn(2, 8, 64, 64))
    for cuts in divisions(frontier.facts):
        *peaks, _ = (each.peaks.peak for each in _Row(frontier, cuts).all)
        falling = peaks[: peaks.index(min(peaks)) + 1]
        assert falling == sorted(falling, reverse=True)
