"""Which custom ``autograd.Function`` classes ran, and what they do while a graph is traced, which would look into them.

A node of autograd's graph names the class it belongs to in ``_forward_cls`` alone. Read in PyTorch 2.11 to 2.15.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memrewrite.torch_internals.autograd_nodes import nodes_behind
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.torch_internals.subclasses import subclasses
from memrewrite.torch_internals.versions import require

require("autograd.Function._backward_cls._forward_cls")

_NOT_CUSTOM = ("torch", "functorch", "memrewrite")
# Functions that belong to what a graph does keep, or that stand in for what does.
_NOT_THE_MODELS = ("torch.utils.checkpoint", "torch._library", "memrewrite.simulate")

Forward = Callable[..., Any]
Replacement = Callable[[type, Forward, Any, tuple[Any, ...]], Any]


@process_wide
@contextmanager
def function_calls() -> Iterator[list[type]]:
    """The custom ``autograd.Function`` classes applied meanwhile where a gradient may flow, once for each call.

    Other threads are not looked at: there, Functions are tried.
    """
    calls: list[type] = []
    here = threading.get_ident()
    # Python's own way to bind a method of a class: PyTorch 2.15 wrote ``apply`` in C, and others had a classmethod.
    bound = vars(torch.autograd.Function)["apply"].__get__

    def seen(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and torch.is_grad_enabled() and not cls.__module__.startswith(_NOT_THE_MODELS):
            calls.append(cls)
        return bound(None, cls)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(seen)):
        yield calls


def functions_behind(output: Any) -> list[type]:
    """The custom ``autograd.Function`` classes in the autograd graph of what forward returned."""
    found: list[type] = []
    for node in nodes_behind(tensors_in(output)):
        kind = getattr(node, "_forward_cls", None)  # only custom ones have it
        if kind is not None and not kind.__module__.startswith(_NOT_THE_MODELS):
            found.append(kind)
    return found


@process_wide
@contextmanager
def forwards_replaced(kinds: Iterable[type], replacement: Replacement) -> Iterator[None]:
    """Meanwhile these classes, however they are applied, give ``replacement(kind, forward, context, args)``.

    ``forward`` takes a context first in any case; a class that sets it up apart has none yet, and does not get there.
    """
    with ExitStack() as stack:
        for kind in dict.fromkeys(kinds):
            for name, method in _methods(kind, replacement).items():
                stack.enter_context(mock.patch.object(kind, name, staticmethod(method)))
        yield


def _methods(kind: Any, replacement: Replacement) -> dict[str, Forward]:
    """What takes the place of the methods of a class."""
    own: Forward = kind.forward
    if kind.setup_context == torch.autograd.Function.setup_context:

        @functools.wraps(own)
        def forward(context: Any, *args: Any) -> Any:
            return replacement(kind, own, context, args)

        return {"forward": forward}

    @functools.wraps(own)  # PyTorch asks for its signature
    def forward_alone(*args: Any) -> Any:
        return replacement(kind, lambda context, *given: own(*given), None, args)

    return {"forward": forward_alone, "setup_context": lambda context, inputs, output: None}


def kept_as_attributes(output: Any) -> list[Tensor]:
    """The tensors that the contexts of the custom Functions that gave ``output`` hold, but those saved for backward."""
    if not torch.is_grad_enabled():  # a view that was written to then may not be asked
        return []
    nodes = {leaf.grad_fn for leaf in tensors_in(output)}
    held = [vars(node) for node in nodes if getattr(node, "_forward_cls", None) is not None]
    return tensors_in(held)


@dataclass(frozen=True)
class Methods:
    """The static methods of a custom Function; ``setup_context`` is None where forward takes the context."""

    forward: Forward
    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None


def custom_functions() -> dict[type, Methods]:
    """Every custom ``autograd.Function`` class there is, with its methods."""
    found: dict[type, Methods] = {}
    for kind in subclasses(torch.autograd.Function):
        if kind.__module__.partition(".")[0] not in _NOT_CUSTOM:
            apart = kind.setup_context != torch.autograd.Function.setup_context
            found[kind] = Methods(kind.forward, kind.backward, kind.setup_context if apart else None)
    return found


@process_wide
@contextmanager
def methods_replaced(replacements: Mapping[type, Methods]) -> Iterator[None]:
    """Meanwhile these classes have these methods."""
    with ExitStack() as stack:
        for kind, methods in replacements.items():
            for name, method in vars(methods).items():
                if method is not None:
                    stack.enter_context(mock.patch.object(kind, name, staticmethod(method)))
        yield


class Context:
    """Stands for the context of a Function whose backward never runs: it takes what is set, and keeps no tensor."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(each, Tensor) and each.requires_grad for each in args)

    def _take(self, *args: Any) -> None:
        """As the methods of a context do, of which nothing here depends on."""

    save_for_backward = save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _take
