"""What products, convolutions, attention and losses with their heads take while they run, which Inductor leaves alone.

Measured on CUDA as for eager models (``memrewrite.targets.transients``), with the sizes that a graph is traced with.
Inductor chooses the memory format of convolutions, so that the more of both counts. A loss makes some rows of logits at
a time: the fewer, the less it takes, and the longer.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from memrewrite.observe.flops import FLOPS
from memrewrite.records.tensor_like import TensorLike
from memrewrite.runtime.linear_cross_entropy import LOSS
from memrewrite.targets.transients import Call, transients_on
from memrewrite.torch_internals.compiled_code import beside
from memrewrite.torch_internals.fake_tensors import real_tensors
from memrewrite.torch_internals.operators import OpOverload, argument_names
from memrewrite.torch_internals.partitioning import number

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_ROWS = argument_names(LOSS).index("rows")
_FEWEST = 128  # rows: a product of fewer takes no less time, as it has to read the whole matrix of a head


def scratch(nodes: tuple[fx.Node, ...], share: int = 1) -> tuple[int, ...]:
    """The bytes that each node takes while it runs besides its results; 0 on other devices than CUDA.

    Losses make so many times fewer rows at once as ``share`` says.
    """
    calls = [list(_calls(node, share)) for node in nodes]
    devices = {each.device for made in calls for _, args, _ in made for each in _tensors(args)}
    table = next((found for device in devices if (found := transients_on(device)) is not None), None)
    if table is None:
        return (0,) * len(nodes)
    for call in (each for made in calls for each in made):
        table.lookup(*call)
    with real_tensors(), beside():  # a loss compiles what it computes of logits
        table.probe()
    return tuple(max((table.lookup(*call).bytes for call in made), default=0) for made in calls)


def shares(nodes: tuple[fx.Node, ...]) -> list[int]:
    """How many times fewer rows losses may make at a time than they were told."""
    most = max((_rows(node) for node in nodes if node.target is LOSS), default=0)
    return [2**i for i in range(1, 32) if most >= 2**i * _FEWEST]


def make_fewer_rows(graph: fx.Graph, share: int) -> None:
    """Let losses make so many times fewer rows at a time."""
    for node in graph.find_nodes(op="call_function", target=LOSS):
        node.args = _with_fewer_rows(node, share)


def _with_fewer_rows(node: fx.Node, share: int) -> tuple[Any, ...]:
    rows = _rows(node)
    return *node.args[:_ROWS], max(rows // share, min(rows, _FEWEST)), *node.args[_ROWS + 1 :]


def _rows(node: fx.Node) -> int:
    rows = node.args[_ROWS]
    assert isinstance(rows, int)  # noqa: S101  (as its operator says)
    return rows


def _calls(node: fx.Node, share: int) -> Iterator[Call]:
    """What a node may call."""
    target = node.target
    if not isinstance(target, OpOverload) or not (target.overloadpacket in FLOPS or target is LOSS):
        return
    given = _with_fewer_rows(node, share) if target is LOSS else node.args
    args, kwargs = map_aggregate((given, dict(node.kwargs)), _as_traced)
    yield target, args, kwargs
    if "convolution" in target.__name__:
        yield target, map_aggregate(args, _channels_last), kwargs


def _as_traced(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _as_traced(value.meta.get("val"))
    if isinstance(value, Tensor):
        sizes, strides = (tuple(map(number, each)) for each in (value.shape, value.stride()))
        return TensorLike(sizes, strides, value.dtype, value.device)
    return number(value) if isinstance(value, torch.SymInt) else value


def _channels_last(value: Any) -> Any:
    if not isinstance(value, TensorLike) or (last := _LAST.get(len(value.shape))) is None:
        return value
    return replace(value, stride=torch.empty(value.shape, device="meta", memory_format=last).stride())


def _tensors(args: tuple[Any, ...]) -> list[TensorLike]:
    return [each for each in args if isinstance(each, TensorLike)]
