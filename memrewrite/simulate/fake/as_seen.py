"""What a submodule that stays a call gives on fake tensors: what it does there, or where it needs values, as seen."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.fake.refusals import needs_data
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS
from memrewrite.torch_internals.pytrees import TreeSpec, tree_leaves, tree_unflatten

_KEY = "memrewrite_seen"  # in a node's meta, which graphs copy with the node


def note_seen(node: fx.Node, leaves: Sequence[Any], tree: TreeSpec) -> None:
    """Say of a call what it gave on real tensors, tensors in words."""
    node.meta[_KEY] = leaves, tree


def on_fakes_or_seen(node: fx.Node, run: Callable[[], Any], given: Any) -> Any:
    """What the call at ``node`` gives for ``given``: what ``run`` does, or fake tensors like those that were seen."""
    try:
        return run()
    except FAKE_TENSOR_ERRORS:
        return like_seen(given, *node.meta[_KEY])
    except Exception as error:
        if not needs_data(str(node.target), error):
            raise
        return like_seen(given, *node.meta[_KEY])


def like_seen(given: Any, leaves: Sequence[Any], tree: TreeSpec) -> Any:
    """Fake tensors like those that were seen, with gradients that go to the tensors that were ``given``."""
    return tree_unflatten([_like(leaf, given) if isinstance(leaf, TensorLike) else leaf for leaf in leaves], tree)


def _like(seen: TensorLike, given: Any) -> Tensor:
    made = torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device=seen.device)
    if not made.is_floating_point():
        return made
    trained = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return made + sum(leaf.sum().to(made.dtype) for leaf in trained) if trained else made
