"""What a submodule that stays a call gives on fake tensors: what it does there, or where it needs values, as seen."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.fake.refusals import takes_data
from memrewrite.torch_internals.pytrees import TreeSpec, tensors_in, tree_unflatten

_SEEN, _KEPT = "memrewrite_seen", "memrewrite_kept"  # in a node's meta, which graphs copy with the node


def note_seen(node: fx.Node, leaves: Sequence[Any], tree: TreeSpec) -> None:
    """Say of a call what it gave on real tensors, tensors in words."""
    node.meta[_SEEN] = leaves, tree


def note_kept(node: fx.Node, size: int) -> None:
    """Say of a call how many bytes autograd kept of what it made on real tensors."""
    node.meta[_KEPT] = size


def on_fakes_or_seen(node: fx.Node, run: Callable[[], Any], given: Any) -> Any:
    """What the call at ``node`` gives for ``given``: what ``run`` does, or fake tensors like those that were seen."""
    try:
        return run()
    except Exception as error:
        if not takes_data(error):
            raise
    leaves, tree = node.meta[_SEEN]
    return like_seen(given, leaves, tree, node.meta.get(_KEPT, 0))


def like_seen(given: Any, leaves: Sequence[Any], tree: TreeSpec, kept: int = 0) -> Any:
    """Fake tensors like those that were seen, with gradients that go to the tensors that were ``given``.

    So many bytes are ``kept`` for that.
    """
    tensors = tensors_in(given)
    likes = [leaf for leaf in leaves if isinstance(leaf, TensorLike)]
    made = iter(_Seen.apply(likes, kept, *tensors))  # type: ignore[no-untyped-call]
    return tree_unflatten([next(made) if isinstance(leaf, TensorLike) else leaf for leaf in leaves], tree)


class _Seen(torch.autograd.Function):
    """Gives and keeps what was seen."""

    @staticmethod
    def forward(ctx: Any, likes: list[TensorLike], kept: int, *given: Tensor) -> tuple[Tensor, ...]:
        made = [like.empty() for like in likes]
        private = torch.empty(kept, dtype=torch.uint8, device=made[0].device) if made and kept else None
        ctx.save_for_backward(private, *given)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        _, *given = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(torch.empty_like(t) if need else None for t, need in zip(given, wanted, strict=True))
