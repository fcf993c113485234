"""Smaller inputs of the same kind: what a drop-in runs at any size is verified at more than one."""

from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import MeasurementError
from memrewrite.runtime.dropin import named_values
from memrewrite.torch_internals.pytrees import tree_leaves, tree_map
from memrewrite.workload.step import Inputs

# For the smallest and for one in between, what is tried until the program takes it: a share of the sizes that vary, and
# so much more than the least.
_SHARES = (((0.0, 0), (0.0, 1), (0.25, 0)), ((0.5, 0), (0.75, 0)))
_MORE = range(16)  # where the user names ranges: forward may take only sizes that something divides


def smaller_inputs(rewritten: nn.Module, inputs: Inputs, *, named: bool = False) -> list[list[Inputs]]:
    """The first elements along all sizes that vary: for each of two kinds of size, the candidates.

    The smallest is the least of a range that the user named; with ``named``, the others stay as they are. None where no
    size varies, or only parts inside of the model are rewritten.
    """
    program: Any = getattr(type(rewritten), "_memrewrite", None)
    if program is None:
        return []
    full = sizes_of(rewritten, inputs)
    if not any(size > program.ranges.get(name, ("", 2, 0))[1] for name, size in full.items()):
        return []
    names = {id(leaf): _varying(shape) for leaf, shape in _shapes(program, inputs)}
    kinds = []
    for shares in _SHARES:
        tried = [*((shares[0][0], more) for more in _MORE), *shares[1:]] if program.ranges else shares
        cut = {name: size for name, size in full.items() if name in program.ranges or not named}
        sizes = [
            full | {n: _smaller(size, program.ranges.get(n), *share) for n, size in cut.items()} for share in tried
        ]
        kinds.append([_cut(inputs, names, each) for each in sizes if not program.ranges or program.fits(**each)])
    return kinds


def sizes_of(rewritten: nn.Module, inputs: Inputs) -> dict[str, int]:
    """The sizes of inputs that vary, by the names that the program of the whole model has for them."""
    shapes = _shapes(vars(type(rewritten))["_memrewrite"], inputs)
    return {name: leaf.shape[dim] for leaf, shape in shapes for dim, name in _varying(shape).items()}


def _shapes(program: Any, inputs: Inputs) -> list[tuple[Tensor, tuple[int | str, ...]]]:
    """The tensors among the inputs, and what the program says of their sizes."""
    values = named_values(program.names, inputs.args, inputs.kwargs) if program.names else (inputs.args, inputs.kwargs)
    specs = zip(tree_leaves(values), program.leaves, strict=True)
    return [(leaf, spec[2]) for leaf, spec in specs if isinstance(leaf, Tensor)]


def _varying(shape: tuple[int | str, ...]) -> dict[int, str]:
    """The names of the sizes that vary, by dimension."""
    return {dim: size for dim, size in enumerate(shape) if isinstance(size, str)}


def _smaller(size: int, named: tuple[str, int, int] | None, share: float, more: int) -> int:
    if named is None:
        return min(size, max(2 + more, int(share * size)))
    least = named[1]
    return min(size, least + more + int(share * max(0, size - least)))


def _cut(inputs: Inputs, names: dict[int, dict[int, str]], sizes: dict[str, int]) -> Inputs:
    parts: dict[int, Tensor] = {}  # one for each tensor, however often it is given

    def cut(leaf: Any) -> Any:
        if not names.get(id(leaf)):
            return leaf
        if id(leaf) not in parts:
            part = leaf.detach()
            for dim, name in names[id(leaf)].items():
                part = part.narrow(dim, 0, sizes[name])
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
