"""What is traced with sizes that vary is the same where arithmetic on them, and what fakes give, is remembered."""

import contextlib
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional

from memrewrite.records.lines import is_users
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.size_arithmetic import replaced, sizes_remembered
from memrewrite.torch_internals.symbolic_recall import SymbolicRecall
from memrewrite.torch_internals.tracing import code_when_run, notes_in_short

AUTO = Dim.AUTO


class Texts(nn.Module):
    """Equal layers of attention and products, reshaped by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.inside = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))
        self.outside = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, inside, outside in zip(self.norms, self.inside, self.outside, strict=True):
            batch, length, width = x.shape
            q, k, v = inside(norm(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + outside(mixed.transpose(1, 2).reshape(batch, length, width).to(torch.bfloat16).float())
        return x[:, : length // 2].mean((1, 2)) + x.sum(dtype=torch.float64) / length


class Images(nn.Module):
    """Convolutions with statistics, and sizes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)), inplace=True)
            x = functional.pad(functional.interpolate(x, scale_factor=2.0), (0, 1, 1, 0))
            x = functional.max_pool2d(x, 2)
        return torch.cat([x, x.flip(0)], 1).flatten(1)[:, ::2]


class Widening(nn.Module):
    """Layers that have other channels each."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 + i, 4 + i, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).sigmoid() * x.shape[0]
        return x


class Numbers(nn.Module):
    """Numbers that follow from sizes, views that are written, lists, and the same size under several names."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows, columns = x.shape
        places = torch.arange(columns)
        mask = (places[None] < places[:, None]) & (places >= min(rows, columns) - columns)
        found = x.new_zeros(rows * 2, y.shape[1])
        found[rows:].copy_(y)
        for _ in range(2):
            for part in found.chunk(2):
                part.mul_(rows)
            found = torch.stack([found, found + columns], 1).reshape(-1, y.shape[1])[: 2 * rows]
        return found, mask, x.expand(3, -1, -1).split([1, 2])[1], torch.where(mask, 1.0, x.sum()), (x @ y.t()).div(rows)


MODELS: dict[str, tuple[nn.Module, tuple[Tensor, ...], Any]] = {
    "texts": (Texts(), (torch.randn(4, 6, 8),), ({0: AUTO, 1: AUTO},)),
    "images": (Images(), (torch.randn(4, 3, 10, 8),), ({0: AUTO, 2: AUTO, 3: AUTO},)),
    "widening": (Widening(), (torch.randn(4, 3, 10, 8),), ({0: AUTO},)),
    "widening, all sizes": (Widening(), (torch.randn(4, 3, 10, 8),), ({0: AUTO, 2: AUTO, 3: AUTO},)),
    "numbers": (Numbers(), (torch.randn(6, 8), torch.randn(6, 8)), ({0: AUTO, 1: AUTO}, {0: AUTO, 1: AUTO})),
    "one size": (Texts(), (torch.randn(4, 6, 8),), None),
}


def traced(name: str, *around: Any) -> list[Any]:
    """All that export says of the model, in these contexts."""
    model, inputs, shapes = MODELS[name]
    with contextlib.ExitStack() as stack:
        for each in around:
            stack.enter_context(each)
        program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)
    graph_module = program.module()
    text: list[Any] = [str(program.range_constraints), str(program.graph_signature)]
    for each in graph_module.modules():
        for node in each.graph.nodes if isinstance(each, torch.fx.GraphModule) else ():
            value = node.meta.get("val")
            place = (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, FakeTensor) else value
            text.append(f"{node.format_node()} {node.args} {node.kwargs} {place} {_line(node)}")
    return [*text, getattr(graph_module, "code", "")]


def _line(node: torch.fx.Node) -> str:
    """Where it comes from: of its stack the innermost line outside of PyTorch, "" where that is in ``traced``."""
    places = re.findall(r'File "(.+)", line (\d+), in (.+)', node.meta.get("stack_trace") or "")
    line = next((f"{file}:{number} {name}" for file, number, name in reversed(places) if is_users(file)), "")
    return "" if line.endswith("traced") else line


@pytest.mark.parametrize("name", MODELS)
def test_what_is_traced_is_the_same(name: str) -> None:
    model, *_ = MODELS[name]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    plain = traced(name)
    sooner = traced(name, SymbolicRecall(), sizes_remembered(), notes_in_short(), code_when_run())
    assert sooner == plain
    assert len(plain) > 20
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "operators"),
    [("texts", ("aten.mm.", "aten._unsafe_view.")), ("widening", ("batch_norm", "aten.sigmoid."))],
)
def test_later_layers_are_given_what_the_first_was(
    name: str, operators: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    dispatch = FakeTensorMode.dispatch

    def noted(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(str(func))
        return dispatch(mode, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    found = []
    for around in ((), (SymbolicRecall(), sizes_remembered())):
        asked.clear()
        traced(name, *around)
        found.append([sum(each in func for func in asked) for each in operators])
    plain, recalled = found
    assert plain[0] - recalled[0] == 2  # the second and the third layer
    assert plain[1] - recalled[1] >= 2


def test_arithmetic_on_sizes_is_done_once() -> None:
    done: list[str] = []
    multiply = SymNode.mul

    def noted(one: Any, other: Any) -> Any:
        done.append(f"{one} * {other}")
        return multiply(one, other)

    with mock.patch.object(SymNode, "mul", noted):
        traced("texts")
        plain, done[:] = len(done), []
        with sizes_remembered():
            traced("texts")
    assert len(done) < plain / 4


def test_a_size_that_comes_to_be_another_one_is_not_taken_for_what_it_was() -> None:
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment)
    varying: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    sizes: list[Any] = [
        mode.from_tensor(torch.ones(5), source=ConstantSource(name), symbolic_context=varying).shape[0] for name in "ab"
    ]
    first, second = sizes
    with sizes_remembered():
        before, apart = replaced(environment), first + second
        assert first + second == apart
        assert replaced(environment) == before
        assert len(apart.node.expr.free_symbols) == 2
        torch._check(first == second)
        assert replaced(environment) != before
        assert len((first + second).node.expr.free_symbols) == 1


def test_each_result_of_arithmetic_is_an_object_of_its_own() -> None:
    found: list[Any] = []

    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.extend(x.shape[0] * 3 for _ in range(2))
            return x.new_zeros(found[0]) + x.new_ones(found[1])

    with sizes_remembered():
        torch.export.export(Sizes(), (torch.ones(4, 2),), dynamic_shapes=({0: AUTO},), strict=False)
    one, other = found
    assert str(one) == str(other)
    assert one.node is not other.node


def test_a_graph_of_export_runs_when_it_is_called() -> None:
    model, inputs, shapes = MODELS["texts"]
    with code_when_run():
        module = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False).module()
    assert torch.equal(module(*inputs), model(*inputs))
    assert "scaled_dot_product_attention" in module.code
    again: Any = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False).module()
    assert module.code == again.code
