"""Gradients of zeros: compiled, what a model gives besides its loss has a gradient, too.

A model that computes its loss itself gives its logits as well. Eagerly nothing is done about those the loss does not
come from. AOTAutograd's backward takes a gradient of every output that needs one, so it is handed zeros: for the logits
of a language model with 128,256 words 2 GB for 8,192 tokens in bfloat16, from the beginning of backward until what it
computes for the logits itself is there.

PyTorch 2.11 holds them until backward ends (pytorch/pytorch#177837). They are not counted so long: plans would leave
room for more than compiled code takes. What it takes beyond its plan is measured (``search.fit_to_budget``).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.torch_internals.pytrees import tensors_in


@contextmanager
def zero_gradients(module: nn.Module) -> Iterator[None]:
    """Let each backward pass through ``module`` hold such zeros, if backward begins at a number that it gives."""
    held: dict[int, Tensor] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        held.clear()
        zeros: dict[int, Callable[[], Tensor]] = {}
        given = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
        for position, tensor in enumerate(given):
            if tensor.dim():
                zeros[position] = functools.partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device)
                tensor.register_hook(functools.partial(let_go, position))
            else:  # a loss
                tensor.register_hook(functools.partial(hold, zeros))

    def hold(zeros: dict[int, Callable[[], Tensor]], gradient: Tensor) -> None:
        while zeros:  # of several losses the first one is enough
            position, make = zeros.popitem()
            held[position] = make()

    def let_go(position: int, gradient: Tensor) -> None:
        held.pop(position, None)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
