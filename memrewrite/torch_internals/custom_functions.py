"""Which custom ``autograd.Function`` classes ran: their backward is Python, which a captured graph would lose.

A node of autograd's graph names the class it belongs to in ``_forward_cls`` alone. Read in PyTorch 2.11 to 2.15.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.torch_internals.versions import require

require("autograd.Function._backward_cls._forward_cls")

_OF_TORCH = ("torch.utils.checkpoint", "torch._library")  # Functions that belong to what a graph does keep


@process_wide
@contextmanager
def function_calls() -> Iterator[list[str]]:
    """The names of custom ``autograd.Function`` classes applied meanwhile where a gradient may flow."""
    calls: list[str] = []
    # Python's own way to bind a method of a class: PyTorch 2.15 wrote ``apply`` in C, and others had a classmethod.
    bound = vars(torch.autograd.Function)["apply"].__get__

    def seen(cls: type, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not cls.__module__.startswith(_OF_TORCH):
            calls.append(cls.__name__)
        return bound(None, cls)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(seen)):
        yield calls


def functions_behind(output: Any) -> list[str]:
    """The names of custom ``autograd.Function`` classes in the autograd graph of what forward returned."""
    queue = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(queue)
    names: list[str] = []
    while queue:
        node = queue.pop()
        kind = getattr(node, "_forward_cls", None)  # only custom ones have it
        if kind is not None and not kind.__module__.startswith(_OF_TORCH):
            names.append(kind.__name__)
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        queue.extend(new)
    return names
