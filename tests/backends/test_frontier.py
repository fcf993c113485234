"""Where forward is divided, and what of it is never kept."""

import pytest
import torch
from torch import Tensor, nn

from memrewrite.backends.divisions import divisions
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
