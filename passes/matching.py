"""What stands between a matched pattern and its replacement, asked of the observed effects and of single calls.

A pattern is its inner nodes and its root; its leaves are what the replacement will read, at the root's place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_arg

from memrewrite.observe.effects import Effects
from memrewrite.passes.spelling import Spelling, operation, tensor

CONTEXTS = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")


def obstacle(effects: Effects, root: fx.Node, inner: Sequence[fx.Node], x: fx.Node) -> str | None:
    """Why ``root`` and ``inner``, elementwise operations on ``x``, cannot become one operation on ``x``; None if so."""
    return _promotion(root, inner, x) or between(effects, root, inner, x) or _written_later(effects, root, x)


def between(effects: Effects, root: fx.Node, inner: Sequence[fx.Node], x: fx.Node) -> str | None:
    """Why ``x`` cannot be read where ``root`` is instead of where the first of ``inner`` reads it; None if it can."""
    return _detached(effects, root, inner) or _rewritten(effects, root, inner, x)


def shared(inner: Iterable[fx.Node], root: fx.Node) -> str | None:
    """Why the tensors of ``inner`` would live on after the rewrite: something outside the pattern uses one."""
    pattern = {*inner, root}
    for node in pattern - {root}:
        for user in node.users:
            if user not in pattern:
                return f"Its intermediate {node.name} is used elsewhere (by {user.name}), so nothing would be saved."
    return None


@dataclass(frozen=True)
class Kept:
    """What autograd keeps of one call: bytes beside its operands and result, and whether its result."""

    private: int
    result: bool


def kept_by(node: fx.Node, call: Spelling, trained: bool = False) -> Kept:
    """Run ``call``, a spelling of ``node``, alone on fake tensors like the observed ones: what autograd keeps.

    ``trained`` lets all of them require a gradient.
    """
    saved: list[torch.UntypedStorage] = []
    given: list[torch.UntypedStorage] = []

    def pack(kept: Tensor) -> object:
        if not _among(kept.untyped_storage(), saved):
            saved.append(kept.untyped_storage())
        return None

    def like(source: fx.Node) -> Any:
        value = tensor(source)
        if value is None:
            return source.meta["val"]
        always = trained and (value.is_floating_point() or value.is_complex())
        twin = torch.empty_like(value).requires_grad_(value.requires_grad or always).clone()
        given.append(twin.untyped_storage())
        return twin

    args, kwargs = map_arg((call.args, call.kwargs), like)
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda token: torch.empty(0, device="cpu")):
        result = call.function(*args, **kwargs).untyped_storage()
    private = [storage for storage in saved if storage is not result and not _among(storage, given)]
    return Kept(sum(storage.nbytes() for storage in private), _among(result, saved))


def _among(storage: torch.UntypedStorage, others: Iterable[torch.UntypedStorage]) -> bool:
    return any(storage is other for other in others)


def inherit(new: fx.Node, old: fx.Node) -> None:
    """Let ``new`` stand where ``old`` stood: same module path, source line and observed value, and all its users."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def erase(nodes: Iterable[fx.Node]) -> None:
    """Erase those of ``nodes`` (last one first) that nothing uses any more."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)


def _promotion(root: fx.Node, inner: Sequence[fx.Node], x: fx.Node) -> str | None:
    value = tensor(x)
    if value is None or not value.is_floating_point():
        dtype = "no tensor" if value is None else value.dtype
        return f"Its input is {dtype}, which the written-out form promotes and the single operation does not."
    for node in (*inner, root):
        other = tensor(node)
        if other is None or other.dtype != value.dtype or other.shape != value.shape:
            is_a = "no tensor" if other is None else f"{other.dtype} {tuple(other.shape)}"
            return f"One of its operations gives {is_a}, its input is {value.dtype} {tuple(value.shape)}."
    return None


def _detached(effects: Effects, root: fx.Node, inner: Sequence[fx.Node]) -> str | None:
    result = tensor(root)
    for node in inner:
        value = tensor(node)
        if value is not None and result is not None and value.requires_grad != result.requires_grad:
            return f"{node.name} and {root.name} do not take part in the gradient alike."
    for node in _span(effects, root, inner):
        if operation(node) in CONTEXTS:
            return f"A no_grad or autocast region begins or ends inside the pattern (at {node.name})."
    return None


def _rewritten(effects: Effects, root: fx.Node, inner: Sequence[fx.Node], x: fx.Node) -> str | None:
    leaves = {leaf for node in inner for leaf in node.all_input_nodes} | {x, *inner}
    watched = {storage for leaf in leaves for storage in effects.of[leaf].outputs}
    for node in _span(effects, root, inner):
        if effects.of[node].writes & watched:
            return f"{node.name} writes a tensor of the pattern before {root.name} reads it."
    return None


def _written_later(effects: Effects, root: fx.Node, x: fx.Node) -> str | None:
    """Why the single operation cannot keep ``x``, as it would of any that requires a gradient."""
    for node in effects.order[effects.position[root] :]:
        if effects.of[node].writes & effects.of[x].outputs:
            return f"{node.name} writes its input {x.name} later, which the single operation keeps for its gradient."
    return None


def _span(effects: Effects, root: fx.Node, inner: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes between the first of ``inner`` and ``root`` in execution order."""
    first = min(effects.position[node] for node in inner)
    return effects.order[first : effects.position[root]]
