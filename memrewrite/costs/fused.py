"""What nodes take where ``torch.compile`` runs their segment again: it fuses all but products into what reads them."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from memrewrite.costs import Costs
from memrewrite.observe.effects import Effects


def when_fused(costs: Costs, effects: Effects) -> Costs:
    """``costs`` where a product takes what it took, and other nodes only what it takes to hand products a tensor.

    That is written and read once more, in autocast's type. All else is read and computed with what reads it.
    """
    again = {}
    for node, facts in effects.of.items():
        if not facts.flops and facts.moved:
            handed = feeds_products(node, effects)
            again[node] = costs.roofline.ms((0, 2 * _bytes(node, costs.amp)), None) if handed else 0.0
    return replace(costs, again=again)


def feeds_products(node: fx.Node, effects: Effects) -> bool:
    """Whether compiled code has to write out the result of ``node``, because a product reads it."""
    return any(effects.of[user].flops for user in _users(node, effects))


def _users(node: fx.Node, effects: Effects) -> Iterator[fx.Node]:
    """What reads the result of ``node``, through views of it as well."""
    for user in node.users:
        if user in effects.of and not effects.of[user].moved and not effects.of[user].flops:
            yield from _users(user, effects)
        else:
            yield user


def _bytes(node: fx.Node, amp: torch.dtype | None) -> int:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return 0
    return value.nbytes if amp is None else value.numel() * min(value.element_size(), amp.itemsize)
