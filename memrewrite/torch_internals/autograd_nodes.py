"""What autograd notes, by its own numbers, and what it is running now. Read in PyTorch 2.11 to 2.15.

Which node of the graph runs, and how they are numbered, is told by no public function.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memrewrite.torch_internals.versions import require

require(
    "_C._autograd._get_sequence_nr",
    "_C._current_autograd_node",
    "Tensor._backward_hooks",
    "Tensor._is_view",
    "Tensor._post_accumulate_grad_hooks",
    "nn.modules.module._has_any_global_hook",
)


_PART_OF_STEPS = ("torch.", "memrewrite.torch_internals.")  # modules whose hooks sum up gradients among processes


def next_backward_number() -> int:
    """The number autograd gives to what it is the next to note for backward in this thread; they rise in forward."""
    return int(torch._C._autograd._get_sequence_nr())


def backward_number() -> int | None:
    """The number of what autograd is running now; None outside backward and while it adds to ``.grad``."""
    node = torch._C._current_autograd_node()
    return None if node is None or node.name().endswith("AccumulateGrad") else int(node._sequence_nr())


def gives_gradient_of_leaf() -> bool:
    """Whether a formula of backward is running, without grad mode unlike what runs again, that gives it to a leaf."""
    node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    following = () if node is None else (function for function, _ in node.next_functions)
    return any(function is not None and function.name().endswith("AccumulateGrad") for function in following)


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the graph that autograd has behind tensors, each once."""
    seen: set[Any] = set()
    ahead: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while ahead:
        if (node := ahead.pop()) not in seen:
            seen.add(node)
            yield node
            ahead += [each for each, _ in node.next_functions if each is not None]


def has_global_module_hooks() -> bool:
    """Whether hooks for every module are registered; there are functions to register them but none that asks."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd sees the tensor as a view, which operators such as ``linear`` return without saying so."""
    return tensor._is_view()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks are registered on a tensor; there are functions to register them but none that asks."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def acting_hooks(tensor: torch.Tensor) -> list[Any]:
    """The user's functions that are given the gradient of a tensor, or called as it is there, as an optimizer is."""
    return [hook for table in _tables(tensor) for hook in table.values() if not _is_part(hook)]


def _tables(tensor: torch.Tensor) -> list[Any]:
    """The hooks of a tensor by kind; autograd holds these very dictionaries."""
    return [table for table in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if table]


def _is_part(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_PART_OF_STEPS)


@contextmanager
def acting_hooks_off(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let no such function be called meanwhile."""
    tables = [table for tensor in tensors if acting_hooks(tensor) for table in _tables(tensor)]
    hooks = [dict(table) for table in tables]
    for table, kept in zip(tables, hooks, strict=True):
        table.clear()
        table.update({key: hook for key, hook in kept.items() if _is_part(hook)})
    try:
        yield
    finally:
        for table, kept in zip(tables, hooks, strict=True):
            table.clear()
            table.update(kept)
