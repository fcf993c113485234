"""Backward of attention that gives the same each time.

Flash and memory-efficient attention add up gradients in whatever order their blocks end. They do it in one order where
``use_deterministic_algorithms`` makes errors of what has none, and not where it warns of it, as it has to for all else:
products by cuBLAS count as such, whatever they do (``aten/src/ATen/native/transformers/cuda/attention_backward.cu`` and
``aten/src/ATen/Context.cpp``, PyTorch 2.11 to 2.15).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memrewrite.torch_internals.autograd_nodes import nodes_behind

_ORDERED = ("ScaledDotProductFlashAttentionBackward", "ScaledDotProductEfficientAttentionBackward")
"""How the nodes of autograd's graph begin that do so."""


@contextmanager
def summing_in_order() -> Iterator[Callable[[Any], None]]:
    """Gives what is to be told of a loss, for attention behind it to do so, where algorithms are deterministic."""
    if not torch.are_deterministic_algorithms_enabled():
        yield lambda loss: None
        return
    try:
        yield _sum_in_order
    finally:
        _warn_only()  # also where attention itself was what failed


def _sum_in_order(loss: Any) -> None:
    for node in nodes_behind([loss] if isinstance(loss, Tensor) else []):
        if node.name().startswith(_ORDERED):
            node.register_prehook(_strictly)
            node.register_hook(_warn_only)


def _strictly(*gradients: Any) -> None:
    torch.use_deterministic_algorithms(True, warn_only=False)


def _warn_only(*gradients: Any) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
