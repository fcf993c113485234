"""Gradients of zeros: compiled, what a model gives besides its loss has a gradient, too.

A model that computes its loss itself gives its logits as well. Eagerly nothing is done about those the loss does not
come from. AOTAutograd's backward takes a gradient of every output that needs one, so it is handed zeros: for the logits
of a language model with 128,256 words 2 GB for 8,192 tokens in bfloat16, from the beginning of backward until what it
computes for the logits itself is there.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.private import tree_leaves


@contextmanager
def zero_gradients(module: nn.Module) -> Iterator[None]:
    """Let each backward pass through ``module`` hold such zeros, if backward begins at a number that it gives."""
    held: dict[int, Tensor] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        held.clear()
        given = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        others = {position: tensor for position, tensor in enumerate(given) if tensor.dim()}
        for loss in (tensor for tensor in given if not tensor.dim()):
            for position, tensor in others.items():
                loss.register_hook(functools.partial(hold, position, tensor.shape, tensor.dtype, tensor.device))
        for position, tensor in others.items():
            tensor.register_hook(functools.partial(let_go, position))

    def hold(position: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, gradient: Tensor) -> None:
        held[position] = torch.zeros(shape, dtype=dtype, device=device)

    def let_go(position: int, gradient: Tensor) -> None:
        held.pop(position, None)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
