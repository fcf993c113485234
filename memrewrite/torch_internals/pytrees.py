"""The structure of nested inputs and outputs, in the specs that ``torch.export`` and Dynamo speak of them.

``torch.utils._pytree`` is private by its name alone: there is no public spelling. Read in PyTorch 2.11 to 2.15.
"""

from memrewrite.torch_internals.versions import private_imports

with private_imports():
    from torch.utils._pytree import (
        TreeSpec,
        tree_flatten,
        tree_flatten_with_path,
        tree_iter,
        tree_leaves,
        tree_map,
        tree_unflatten,
        treespec_dumps,
    )

__all__ = [
    "TreeSpec",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "treespec_dumps",
]
