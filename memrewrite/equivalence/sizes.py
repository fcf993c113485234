"""Smaller inputs of the same kind: what a drop-in runs at any size is verified at more than one."""

from typing import Any

from torch import Tensor, nn

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
