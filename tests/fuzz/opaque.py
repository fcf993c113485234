"""Submodules and functions that no graph looks into, for random models: hooks, branches on values, own gradients."""

import random
from typing import Any

import torch
from torch import Tensor, nn


class _StraightThrough(torch.autograd.Function):
    """Rounds, and gives the gradient back where the input was small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() <= 1)


def straight_through(x: Tensor) -> Tensor:
    """``x`` in steps of a quarter, with a gradient nevertheless."""
    result: Tensor = _StraightThrough.apply(x)  # type: ignore[no-untyped-call]
    return result


class Quantized(nn.Module):
    """A submodule that calls an ``autograd.Function``."""

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(x)


class Routed(nn.Module):
    """Goes one of two ways that take the same memory, by the values that come in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ways = nn.Parameter(torch.rand(2, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ways[0] if float(x.detach().mean()) > 0 else x * self.ways[1]


class Chosen(nn.Module):
    """Doubles the values that are above 0, whose number nobody knows before."""

    def forward(self, x: Tensor) -> Tensor:
        above = (x.detach().flatten() > 0).nonzero()[:, 0]
        return x.flatten().index_add(0, above, x.flatten()[above]).view(x.shape)


class Lucky(nn.Module):
    """Draws its rate from Python's own random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + random.random())  # noqa: S311


class Counting(nn.Module):
    """Assigns a buffer anew in each call, and scales by it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x / self.calls


class Damped(nn.Module):
    """Registers a hook on the tensor that it returns."""

    def forward(self, x: Tensor) -> Tensor:
        result = torch.tanh(x)
        if result.requires_grad:
            result.register_hook(_halved)
        return result


def _halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.5


def _scaled_before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 1.5,)


def _scaled_backward(module: nn.Module, gradients: Any, of_output: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in gradients)


def hooked(module: nn.Module) -> nn.Module:
    """The module with a hook that changes what it gives."""
    module.register_forward_hook(_scaled)
    return module


def hooked_before(module: nn.Module) -> nn.Module:
    """The module with a hook that changes what it is given."""
    module.register_forward_pre_hook(_scaled_before)
    return module


def hooked_backward(module: nn.Module) -> nn.Module:
    """The module with a hook that changes its gradients."""
    module.register_full_backward_hook(_scaled_backward)
    return module
