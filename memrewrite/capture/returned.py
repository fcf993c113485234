"""What a program returns: all that the model does, or its loss alone, where nobody reads the rest.

A language model returns its logits beside its loss, the largest tensor of its step, and few loops look at them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from memrewrite.capture.captured import Captured
from memrewrite.records.errors import UsageError
from memrewrite.torch_internals.pytrees import tree_unflatten

_NO_LOSS = (
    "returns='loss' is for models that return their loss, as .loss, ['loss'], or where loss_fn finds it; "
    "here loss_fn computes it of what the model returns. Leave it out, or compute the loss in forward."
)


def loss_alone(captured: Captured, loss_of: Callable[[Any], Tensor]) -> Captured:
    """The capture without what the model returns beside the loss that ``loss_of`` finds in it: None is in its place.

    Its graph is changed.
    Raises ``UsageError`` where the loss is none of the tensors that the model returns.
    """
    graph_module = captured.graph_module
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    leaves: Any = output.args[0]
    place = _place(captured, len(leaves), loss_of)
    dropped = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and i != place]
    if not dropped:
        return captured
    output.args = (tuple(None if i in dropped else leaf for i, leaf in enumerate(leaves)),)
    graph_module.recompile()
    sizes = (leaves[i].meta.get("val") for i in dropped)
    shapes = ", ".join(f"{tuple(map(int, size.shape))}" for size in sizes if isinstance(size, Tensor))
    note = f"Returns its loss alone; None is in the place of {len(dropped)} more ({shapes})."
    return replace(captured, returns="loss", notes=(*captured.notes, note))


def _place(captured: Captured, count: int, loss_of: Callable[[Any], Tensor]) -> int:
    """Which of the tensors that the model returns is its loss."""
    marks = [torch.zeros((), device="cpu") for _ in range(count)]
    try:
        found = loss_of(tree_unflatten(marks, captured.output_tree))
    except Exception as error:  # whatever a function says of other numbers than it is for
        raise UsageError(_NO_LOSS) from error
    place = next((i for i, mark in enumerate(marks) if mark is found), None)
    if place is None:
        raise UsageError(_NO_LOSS)
    return place
