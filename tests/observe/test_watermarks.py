"""What is in use at each node of a graph; of pieces that are alike, ``test_pieces`` tells."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from memrewrite.observe.watermarks import watermarks
from memrewrite.workload.step import Step

WIDTH, COPIES = 8, 1000


class Copying(torch.autograd.Function):
    """The sum, which makes copies meanwhile, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool) -> Tensor:
        ctx.forward, ctx.shape = forward, x.shape
        if forward:
            x.expand(COPIES, *x.shape).clone()
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spread = grad.expand(ctx.shape)
        if not ctx.forward:
            spread.expand(COPIES, *ctx.shape).clone()
        return spread, None


@pytest.mark.parametrize("forward", [True, False])
def test_what_a_loss_takes_meanwhile_is_for_the_last_node(forward: bool) -> None:
    def loss_of(leaves: tuple[Tensor]) -> Tensor:
        loss: Tensor = Copying.apply(leaves[0], forward)  # type: ignore[no-untyped-call]
        return loss

    graph = fx.Graph()
    squared = graph.call_function(torch.square, (graph.placeholder("x"),))
    halved = graph.call_function(torch.mul, (squared, graph.get_attr("weight")))
    graph.output((halved,))
    root = nn.Module()
    root.register_parameter("weight", nn.Parameter(torch.ones(WIDTH)))
    found = watermarks(fx.GraphModule(root, graph), [torch.randn(WIDTH, WIDTH)], Step(), loss_of)
    levels = {node.name: mark.forward for node, mark in found.items()}
    assert levels["mul"] - levels["square"] in range(COPIES * WIDTH * WIDTH * 4, COPIES * WIDTH * WIDTH * 4 + 2048)
    assert levels["square"] <= WIDTH * WIDTH * 4 * 2
