"""What is in use at each node of a graph; of pieces that are alike, ``test_pieces`` tells."""

import torch
from torch import Tensor, fx, nn

from memrewrite.observe.watermarks import watermarks
from memrewrite.workload.step import Step

WIDTH, COPIES = 8, 1000


def test_what_a_loss_takes_meanwhile_is_for_the_last_node() -> None:
    def loss_of(leaves: tuple[Tensor]) -> Tensor:
        with torch.no_grad():
            leaves[0].expand(COPIES, WIDTH, WIDTH).clone()
        return leaves[0].sum()

    graph = fx.Graph()
    squared = graph.call_function(torch.square, (graph.placeholder("x"),))
    halved = graph.call_function(torch.mul, (squared, graph.get_attr("weight")))
    graph.output((halved,))
    root = nn.Module()
    root.register_parameter("weight", nn.Parameter(torch.ones(WIDTH)))
    found = watermarks(fx.GraphModule(root, graph), [torch.randn(WIDTH, WIDTH)], Step(), loss_of)
    levels = {node.name: mark.forward for node, mark in found.items()}
    assert levels["mul"] == COPIES * WIDTH * WIDTH * 4 + levels["output"]
    assert levels["square"] <= WIDTH * WIDTH * 4 * 2
