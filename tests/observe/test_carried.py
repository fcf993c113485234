"""Nodes of a rewritten graph that are given what they were given do not run again; all that is observed is the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from memrewrite.observe import effects
from memrewrite.observe.effects import Effects, observe
from memrewrite.torch_internals.operators import set_grad_enabled

aten = torch.ops.aten
Edit = Callable[[fx.Graph, dict[str, fx.Node]], None]


class Net(nn.Module):
    """Two layers, of which the first one's weight is used once more, a mask that no weight decides, and a write."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        mask = aten.gt.Scalar(x, 0.0)
        hidden = aten.relu.default(aten.add_.Scalar(aten.linear.default(x, self.first), 1.0))
        wide = aten.view.default(aten.where.ScalarOther(mask, hidden, 0.5), [2, 2, 8])
        act = aten.sigmoid.default(aten.linear.default(wide, self.second))
        return aten.mul.Tensor(act, hidden[0]), aten.linear.default(hidden, self.first)


def nodes(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.nodes}


def nothing(graph: fx.Graph, there: dict[str, fx.Node]) -> None:
    pass


def looks_the_same(graph: fx.Graph, there: dict[str, fx.Node]) -> None:
    """It keeps its input and not its result."""
    there["relu_default"].target = aten.silu.default


def looks_other(graph: fx.Graph, there: dict[str, fx.Node]) -> None:
    there["view_default"].args = (there["where_scalar_other"], [4, 1, 8])


def in_place(graph: fx.Graph, there: dict[str, fx.Node]) -> None:
    there["sigmoid_default"].target = aten.sigmoid_.default


def one_more(graph: fx.Graph, there: dict[str, fx.Node]) -> None:
    with graph.inserting_after(there["relu_default"]):
        made = graph.call_function(aten.clone.default, (there["relu_default"],))
    there["where_scalar_other"].update_arg(1, made)


def one_less(graph: fx.Graph, there: dict[str, fx.Node]) -> None:
    there["sigmoid_default"].replace_all_uses_with(there["linear_default_1"])
    graph.erase_node(there["sigmoid_default"])


ALWAYS = {"x", "first", "second", "add__scalar", "gt_scalar", "output"}
RUN: dict[Edit, set[str]] = {
    nothing: set(),
    looks_the_same: {"relu_default"},
    looks_other: {"view_default", "linear_default_1", "sigmoid_default", "mul_tensor"},
    in_place: {"sigmoid_default"},
    one_more: {"clone_default", "where_scalar_other"},
    one_less: {"mul_tensor"},
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of nodes as they run."""
    names: list[str] = []
    own = effects._Observer._run

    def run(observer: Any, node: fx.Node, *how: Any) -> Any:
        names.append(node.name)
        return own(observer, node, *how)

    monkeypatch.setattr(effects._Observer, "_run", run)
    return names


def told(found: Effects) -> tuple[Any, ...]:
    """All that is observed, and what values look like."""
    values = {node.name: node.meta["val"] for node in found.order if isinstance(node.meta["val"], Tensor)}
    looks = {name: (v.dtype, v.shape, v.stride(), v.requires_grad, v._is_view()) for name, v in values.items()}
    return [(node.name, found.of[node]) for node in found.order], found.storages, looks


def copied(graph_module: fx.GraphModule, found: Effects) -> tuple[fx.GraphModule, Effects]:
    graph = copy.deepcopy(graph_module.graph)
    return fx.GraphModule(graph_module, graph), found.of_copy(graph)


@pytest.mark.parametrize("options", [{}, {"amp": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("edit", RUN, ids=lambda edit: edit.__name__)
def test_what_is_given_the_same_does_not_run(edit: Edit, options: dict[str, Any], ran: list[str]) -> None:
    first, example = fx.symbolic_trace(Net()), [torch.randn(4, 8)]
    graph_module, before = copied(first, observe(first, example, **options))
    edit(graph_module.graph, nodes(graph_module.graph))
    expected = told(observe(graph_module, example, **options))
    ran.clear()
    assert told(observe(graph_module, example, before=before, **options)) == expected
    assert set(ran) == ALWAYS | RUN[edit]


def test_graphs_are_told_by_graphs_that_were_told(ran: list[str]) -> None:
    graph_module, example = fx.symbolic_trace(Net()), [torch.randn(4, 8)]
    found = observe(graph_module, example)
    for edit in (looks_other, one_more, in_place):
        graph_module, before = copied(graph_module, found)
        edit(graph_module.graph, nodes(graph_module.graph))
        expected = told(observe(graph_module, example))
        ran.clear()
        found = observe(graph_module, example, before=before)
        assert told(found) == expected
        assert len(ran) < len(found.order)


@pytest.mark.parametrize("options", [{"amp": torch.bfloat16}, {"grad": False}], ids=str)
def test_in_another_way_to_run_nothing_is_told(options: dict[str, Any], ran: list[str]) -> None:
    first, example = fx.symbolic_trace(Net()), [torch.randn(4, 8)]
    graph_module, before = copied(first, observe(first, example))
    expected = told(observe(graph_module, example, **options))
    ran.clear()
    assert told(observe(graph_module, example, before=before, **options)) == expected
    assert len(ran) == len(before.order)


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_a_cast_that_autocast_keeps_is_not_missed(amp: torch.dtype | None, ran: list[str]) -> None:
    """It is made by the first node that is given the weight, which need not run, and read by the last."""
    first, example = fx.symbolic_trace(Net()), [torch.randn(4, 8)]
    graph_module, before = copied(first, observe(first, example, amp))
    there = nodes(graph_module.graph)
    there["linear_default_2"].update_arg(0, there["relu_default"].args[0])
    expected = told(observe(graph_module, example, amp))
    ran.clear()
    assert told(observe(graph_module, example, amp, before=before)) == expected
    assert (len(ran) > len(before.order)) == (amp is not None)  # all of them, after some


class Writes(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8), requires_grad=trained)
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.ops.aten.mul.Tensor(x, self.kept)
        late = torch.ops.aten.add_.Tensor(self.kept, self.weight)
        return torch.ops.aten.mul.Tensor(early, late)


@pytest.mark.parametrize("trained", [True, False])
def test_what_gets_a_gradient_as_it_is_written_tells_nothing(trained: bool) -> None:
    """Before, it had none; now it would have one from the start."""
    first, example = fx.symbolic_trace(Writes(trained)), [torch.randn(4, 8).requires_grad_()]
    found = observe(first, example)
    assert (found.runs is None) == trained
    graph_module, before = copied(first, found)
    assert told(observe(graph_module, example, before=before)) == told(observe(graph_module, example))


def test_what_pytorch_tells_no_history_of_is_not_asked_for_it() -> None:
    """A view made without gradients, whose base is then written with them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    hidden = graph.call_function(aten.relu.default, (x,))
    graph.call_function(set_grad_enabled, (False,))
    graph.call_function(aten.select.int, (hidden, 0, 0))
    graph.call_function(set_grad_enabled, (True,))
    graph.call_function(aten.mul_.Scalar, (hidden, 2.0))
    graph.output(hidden)
    assert observe(fx.GraphModule(nn.Module(), graph), [torch.randn(4, 8).requires_grad_()]).runs is None
