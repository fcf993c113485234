"""Simulated stretch by stretch, with what was known of each, or all at once: the same bytes live."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from memrewrite.backends import runs
from memrewrite.backends.live import Live
from memrewrite.backends.plan import Order
from memrewrite.backends.stretches import Stretch
from tests.support.divided import Divided

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


@pytest.mark.parametrize("nodes", [1, 3, 10, 40])
def test_stretches_are_as_all_of_them_at_once(nodes: int, orders: list[Order], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_STRETCH", nodes)
    live = Live(orders[0].facts)
    peaks = [live.peaks(order) for order in orders]
    assert len({each.peak for each in peaks}) > 10
    watermark = live._watermark
    monkeypatch.setattr(live, "_watermark", lambda stretches, *rest: watermark(whole(stretches), *rest))
    assert peaks == [live.peaks(order) for order in orders]
