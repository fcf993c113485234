"""Smaller inputs of the same kind: what a drop-in runs at any size is verified at more than one."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import MeasurementError
from memrewrite.runtime.dropin import named_values
from memrewrite.torch_internals.pytrees import tree_leaves, tree_map
from memrewrite.workload.step import Inputs

LEAST = 2
"""The smallest that a size which varies may be."""
# For the smallest and for one in between, what is tried until the program takes it: a share of the sizes that vary, and
# at least so much.
_SHARES = (((0.0, LEAST), (0.0, 3), (0.25, LEAST)), ((0.5, LEAST), (0.75, LEAST)))


@dataclass(frozen=True)
class Place:
    """A size that varies: of the tensor ``leaf``, which is (in) the input of that name, at ``dim``.

    Those of the same ``symbol`` are the same in each call.
    """

    name: str
    leaf: Tensor
    dim: int
    symbol: str

    @property
    def size(self) -> int:
        """What it is in this call."""
        return self.leaf.shape[self.dim]


def varying(rewritten: nn.Module, inputs: Inputs) -> list[Place]:
    """All sizes of ``inputs`` that vary; none where only parts inside of the model are rewritten."""
    program: Any = getattr(type(rewritten), "_memrewrite", None)
    if program is None:
        return []
    values = named_values(program.names, inputs.args, inputs.kwargs) if program.names else (inputs.args, inputs.kwargs)
    if values is None:  # the call fills other parameters
        return []
    named = zip(program.names, values, strict=True) if program.names else _unnamed(inputs)
    leaves = zip(_names(named), tree_leaves(values), program.leaves, strict=True)
    return [
        Place(name, leaf, dim, symbol)
        for name, leaf, spec in leaves
        if isinstance(leaf, Tensor)
        for dim, symbol in enumerate(spec[2])
        if isinstance(symbol, str)
    ]


def _unnamed(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """Arguments of a forward that does not name them."""
    yield from ((f"input {number}", value) for number, value in enumerate(inputs.args, start=1))
    yield from inputs.kwargs.items()


def _names(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """What each leaf is called: as its parameter, with a number where that has several."""
    for name, value in named:
        count = len(tree_leaves(value))
        yield from (name if count == 1 else f"{name} {number}" for number in range(1, count + 1))


def smaller_inputs(rewritten: nn.Module, inputs: Inputs) -> list[list[Inputs]]:
    """The first elements along all sizes that vary: for each of two kinds of size, the candidates.

    None where no size varies, or only parts inside of the model are rewritten.
    """
    places = varying(rewritten, inputs)
    if not any(place.size > LEAST for place in places):
        return []
    return [[cut(inputs, places, *share) for share in shares] for shares in _SHARES]


def cut(inputs: Inputs, places: Iterable[Place], share: float, least: int) -> Inputs:
    """The first elements at these places: a ``share`` of them, but ``least`` where there are so many."""
    sizes: dict[int, dict[int, int]] = defaultdict(dict)
    for place in places:
        sizes[id(place.leaf)][place.dim] = shortened(place.size, share, least)
    parts: dict[int, Tensor] = {}  # one for each tensor, however often it is given

    def part_of(leaf: Any) -> Any:
        if id(leaf) not in sizes:
            return leaf
        if id(leaf) not in parts:
            part = leaf.detach()
            for dim, size in sizes[id(leaf)].items():
                part = part.narrow(dim, 0, size)
            parts[id(leaf)] = part.clone().requires_grad_(leaf.requires_grad)
        return parts[id(leaf)]

    return Inputs(tree_map(part_of, inputs.args), tree_map(part_of, inputs.kwargs))


def shortened(size: int, share: float, least: int) -> int:
    """What ``cut`` leaves of a size."""
    return min(size, max(least, int(share * size)))


def batch_of(inputs: Inputs) -> int | None:
    """Dimension 0 of the first tensor that has one."""
    return next((tensor.shape[0] for tensor in inputs.tensors() if tensor.dim() > 0), None)


def halved(inputs: Inputs) -> Inputs:
    """The first half of dimension 0 of every tensor that has the batch size there.

    Raises ``MeasurementError`` where there is no half.
    """
    batch = batch_of(inputs)
    if batch is None or batch < 2:
        raise MeasurementError(
            f"The step does not fit in memory even at batch {batch}, so it could not be verified; "
            "verify on the CPU or with smaller example inputs."
        )
    torch.cuda.empty_cache()
    halves = {id(t): t[: batch // 2] for t in inputs.tensors() if t.dim() > 0 and t.shape[0] == batch}

    def half(value: Any) -> Any:
        return halves.get(id(value), value) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(half, (inputs.args, inputs.kwargs))
    return Inputs(args, kwargs)
