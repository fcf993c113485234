"""Simulated stretch by stretch, with what was known of each, or run by run: the same bytes live."""

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from memrewrite.backends import runs
from memrewrite.backends.live import Live, watermark
from memrewrite.backends.plan import Order
from memrewrite.backends.stretches import Run, Stretch
from tests.support.divided import Divided
from tests.support.watermarks import watermark as at_once

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(F.silu(gate) * value)
        return result


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = nn.Sequential(*(Block() for _ in range(4))), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.blocks(x.sigmoid()) * self.scale.exp()).square().sum()


@pytest.fixture(scope="module")
def orders() -> list[Order]:
    """All that the back end looks at for the model."""
    divided = Divided(Chain(), "100%", fused=True)
    divided.step(torch.randn(64, WIDTH))
    assert divided.partition.options is not None
    return [found.order for row in divided.partition.options.frontier.rows for found in row.all]


def whole(stretches: list[Stretch]) -> list[Stretch]:
    """The same as one."""
    starts = accumulate((each.length for each in stretches), initial=0)
    moved = [
        run._replace(at=run.at + start) for each, start in zip(stretches, starts, strict=False) for run in each.runs
    ]
    ends = frozenset[int]().union(*(each.ends for each in stretches))
    return [Stretch(moved, sum(each.length for each in stretches), ends, stretches[0].size)]


def drawn(chance: random.Random, count: int) -> Iterator[Run]:
    """Runs that read what a few before them make, or what is given, which is below zero."""
    for at in range(count):
        reads = (
            tuple(chance.randrange(max(at - chance.choice((3, 90)), -3), at) for _ in range(chance.randrange(3)))
            if at
            else ()
        )
        makes = (at,) if chance.random() < 0.9 else ()
        fused = chance.random() < 0.7
        if makes or chance.random() < 0.5:  # else it does nothing, and stands for a view
            yield Run(
                at, makes, reads, fused, fused or chance.random() < 0.4, chance.random() < 0.1, chance.randrange(3)
            )


@pytest.mark.parametrize("seed", range(200))
def test_any_runs_may_be_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  (no secret)
    count, given = 150, frozenset((-3, -2, -1))
    made, sizes = [*drawn(chance, count)], [chance.choice((4, 4, 8)) for _ in range(count + 3)]
    spike = chance.randrange(len(made))
    made[spike] = made[spike]._replace(scratch=1000)  # the peak, wherever that is
    ends = frozenset(chance.sample(range(-3, count), 5))
    cuts = [0, *sorted(chance.sample(range(1, count), 6)), count]

    def stretch(start: int, end: int) -> Stretch:
        there = [run._replace(at=run.at - start) for run in made if start <= run.at < end]
        return Stretch(there, end - start, ends, sizes.__getitem__)

    pieces = [stretch(start, end) for start, end in pairwise(cuts)]
    for _ in range(2):  # once with nothing known
        peak, living = watermark(pieces, given, ends, sizes.__getitem__)
        assert (peak, sorted(living)) == at_once(made, given, ends, sizes.__getitem__)


def test_what_is_made_in_an_earlier_kernel_of_a_later_stretch_reads_nothing_after_that() -> None:
    """The last is made where the first is, of what is given: that is let go of before the scratch of the second."""
    value: Any = {"fused": True, "reader": True, "heavy": False, "scratch": 0}
    first, second = Run(0, (0,), (-1,), **value), Run(1, (1,), (), False, False, False, 1000)
    chain = [Run(2, (2,), (-1,), **value), Run(3, (3,), (2,), **value)]
    last = Run(4, (4,), (3,), **value)
    given, ends = frozenset((-1,)), frozenset((0, 4))
    runs = [first, second, *chain, last]
    stretches = [Stretch(runs[:4], 4, ends, lambda _: 8), Stretch([last._replace(at=0)], 1, ends, lambda _: 8)]
    peak, living = watermark(stretches, given, ends, lambda _: 8)
    assert (peak, sorted(living)) == at_once(runs, given, ends, lambda _: 8) == (1024, [0, 1, 4])


@pytest.mark.parametrize("nodes", [1, 3, 10, 40])
def test_stretches_are_as_all_of_them_at_once(nodes: int, orders: list[Order], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_STRETCH", nodes)
    live = Live(orders[0].facts)
    peaks = [live.peaks(order) for order in orders]
    assert len({each.peak for each in peaks}) > 10
    watermark = live._watermark
    monkeypatch.setattr(live, "_watermark", lambda stretches, *rest: watermark(whole(stretches), *rest))
    assert peaks == [live.peaks(order) for order in orders]
