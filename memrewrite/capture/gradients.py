"""What a forward does about gradients: whether it asks for them, and what it does where other tensors need them.

    if hidden.requires_grad:
        hidden.register_hook(self.scale)

A captured graph holds one answer, and is right only for calls that give the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from memrewrite.capture.autocasts import noting
from memrewrite.workload.step import Inputs

QUESTIONS = tuple(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn"))
"""What a tensor is asked about gradients."""


@contextmanager
def gradients_asked() -> Iterator[list[str]]:
    """The names of the modules, but PyTorch's own, that ask meanwhile whether gradients are on."""
    asked: list[str] = []
    with mock.patch.object(torch, "is_grad_enabled", noting(torch.is_grad_enabled, asked)):
        yield asked


@contextmanager
def all_or_none(module: nn.Module, needed: bool) -> Iterator[None]:
    """Meanwhile all parameters that can need gradients do and they are on, or none does and they are off."""
    parameters = [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(needed)
        with torch.set_grad_enabled(needed):
            yield
    finally:
        for parameter, flag in zip(parameters, before, strict=True):
            parameter.requires_grad_(flag)


def with_or_without(inputs: Inputs, needed: bool) -> Inputs:
    """The same inputs, of which all that can need gradients do, computed as they may be written, or none does."""

    def make(leaf: Tensor) -> Tensor:
        can = leaf.is_floating_point() or leaf.is_complex()
        plain = leaf.detach()
        return plain.requires_grad_().clone() if needed and can else plain

    return inputs.changed(make)
