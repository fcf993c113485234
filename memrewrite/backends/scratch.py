"""What products, convolutions and attention take while they run, which Inductor leaves to libraries.

Measured on CUDA as for eager models (``memrewrite.targets.transients``), with the sizes that a graph is traced with.
Inductor chooses the memory format of convolutions, so that the more of both counts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from memrewrite.observe.flops import FLOPS
from memrewrite.records.tensor_like import TensorLike
from memrewrite.targets.transients import Call, transients_on
from memrewrite.torch_internals.fake_tensors import real_tensors
from memrewrite.torch_internals.operators import OpOverload
from memrewrite.torch_internals.partitioning import number

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def scratch(nodes: tuple[fx.Node, ...]) -> tuple[int, ...]:
    """The bytes that each node takes while it runs besides its results; 0 on other devices than CUDA."""
    calls = [list(_calls(node)) for node in nodes]
    devices = {each.device for made in calls for _, args, _ in made for each in _tensors(args)}
    table = next((found for device in devices if (found := transients_on(device)) is not None), None)
    if table is None:
        return (0,) * len(nodes)
    for call in (each for made in calls for each in made):
        table.lookup(*call)
    with real_tensors():
        table.probe()
    return tuple(max((table.lookup(*call).bytes for call in made), default=0) for made in calls)


def _calls(node: fx.Node) -> Iterator[Call]:
    """What a node may call."""
    target = node.target
    if not isinstance(target, OpOverload) or target.overloadpacket not in FLOPS:
        return
    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), _as_traced)
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
