"""The graph verifier sees what a pass breaks, and only that."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from memrewrite.capture import capture
from memrewrite.observe.effects import observe
from memrewrite.rewriting.invariants import broken, health
from memrewrite.workload.step import Inputs

aten = torch.ops.aten


class Net(nn.Module):
    """A convolution, a sigmoid (which autograd keeps), a sum that reads both, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        gate = torch.sigmoid(y)
        return torch.flatten(torch.relu(gate + y), 1)


def to(op: object) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.target = op  # type: ignore[assignment]

    return change


def half(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(aten.to.dtype, (node, torch.float64))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


CASES = {
    "relu in place on a sum nobody reads": ("relu", to(aten.relu_.default), None),
    "relu in place on a kept sigmoid": ("add", to(aten.add_.Tensor), "add writes what autograd keeps for sigmoid."),
    "sigmoid in place on a value read later": (
        "sigmoid",
        to(aten.sigmoid_.default),
        "add reads batch_norm after sigmoid has overwritten it.",
    ),
    "another dtype": ("sigmoid", half, "add was torch.float32"),
}


@pytest.mark.parametrize(("name", "change", "sentence"), CASES.values(), ids=CASES.keys())
def test_what_a_pass_breaks(name: str, change: Callable[[fx.Node], None], sentence: str | None) -> None:
    x = torch.randn(2, 3, 8, 8)
    graph_module = capture(Net().train(), Inputs((x,), {})).graph_module
    before = health(observe(graph_module, [x]))
    (node,) = (n for n in graph_module.graph.nodes if n.name == name)
    change(node)
    graph_module.recompile()
    found = broken(before, health(observe(graph_module, [x])))
    if sentence is None:
        assert found == []
    else:
        assert any(text.startswith(sentence) for text in found), found


def test_the_users_own_in_place_operations_are_no_defect() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            first = y[:1]
            y.add_(1)
            return y * first

    x = torch.randn(3)
    before = health(observe(capture(Own().eval(), Inputs((x,), {})).graph_module, [x]))
    assert before.wrongs, "the graph does write what is read later"
    assert broken(before, before) == []
