"""Smaller inputs of the same kind: what a drop-in runs at any size is verified at more than one."""

from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import MeasurementError
from memrewrite.runtime.dropin import named_values
from memrewrite.torch_internals.pytrees import tree_leaves, tree_map
from memrewrite.workload.step import Inputs

# For the smallest and for one in between, what is tried until the program takes it: a share of the sizes that vary, and
# at least so much.
_SHARES = (((0.0, 2), (0.0, 3), (0.25, 2)), ((0.5, 2), (0.75, 2)))


def smaller_inputs(rewritten: nn.Module, inputs: Inputs) -> list[list[Inputs]]:
    """The first elements along all sizes that vary: for each of two kinds of size, the candidates.

    None where no size varies, or only parts inside of the model are rewritten.
    """
    program: Any = getattr(type(rewritten), "_memrewrite", None)
    if program is None:
        return []
    values = named_values(program.names, inputs.args, inputs.kwargs) if program.names else (inputs.args, inputs.kwargs)
    specs = zip(tree_leaves(values), program.leaves, strict=True)
    varying = {id(leaf): _varying(leaf, spec[2]) for leaf, spec in specs if isinstance(leaf, Tensor)}
    if not any(size > 2 for sizes in varying.values() for size in sizes.values()):
        return []
    return [[_cut(inputs, varying, *share) for share in shares] for shares in _SHARES]


def _varying(leaf: Tensor, sizes: tuple[int | str, ...]) -> dict[int, int]:
    """The sizes that vary, by dimension."""
    return {dim: leaf.shape[dim] for dim, size in enumerate(sizes) if isinstance(size, str)}


def _cut(inputs: Inputs, varying: dict[int, dict[int, int]], share: float, least: int) -> Inputs:
    parts: dict[int, Tensor] = {}  # one for each tensor, however often it is given

    def cut(leaf: Any) -> Any:
        if not varying.get(id(leaf)):
            return leaf
        if id(leaf) not in parts:
            part = leaf.detach()
            for dim, size in varying[id(leaf)].items():
                part = part.narrow(dim, 0, min(size, max(least, int(share * size))))
            parts[id(leaf)] = part.clone().requires_grad_(leaf.requires_grad)
        return parts[id(leaf)]

    return Inputs(tree_map(cut, inputs.args), tree_map(cut, inputs.kwargs))


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
