"""Swish, ``x * sigmoid(beta * x)``, in as little memory as it can have.

Written out, autograd saves three tensors of the size of ``x`` (``x`` twice, the sigmoid, and ``beta * x``'s share) and
the usual hand-written backward fills more temporaries than it saves. Here autograd saves ``x`` alone, the forward
makes nothing but its result, and the backward holds at most one temporary beside its result.

This file needs torch only, because its text is also pasted into generated models.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from torch import Tensor, nn


def swish(x: Tensor, beta: float | Tensor = 1.0) -> Tensor:
    """``x * sigmoid(beta * x)``; ``beta`` is a number or a tensor that broadcasts to ``x``.

    For ``beta`` 1 this is ``F.silu`` (one kernel, at most 1 ulp from the written-out form in float32), otherwise
    ``exact_swish``. Autograd saves ``x``, and ``beta`` when it is a tensor.
    """
    if not isinstance(beta, Tensor) and beta == 1 and x.is_floating_point():
        return F.silu(x)
    return exact_swish(x, beta)


def exact_swish(x: Tensor, beta: float | Tensor = 1.0) -> Tensor:
    """``swish`` with the result of the written-out form bit for bit, also for ``beta`` 1 and for half types."""
    if not x.is_floating_point():  # integers promote and complex numbers have another derivative
        return x * torch.sigmoid(_scaled(x, beta))
    result: Tensor = _Swish.apply(x, beta)  # type: ignore[no-untyped-call]
    return result


class Swish(nn.Module):
    """``swish`` as a module. ``beta`` is a Parameter when ``learnable``, else a number, or a buffer for a tensor."""

    beta: float | Tensor

    def __init__(self, beta: float | Tensor = 1.0, learnable: bool = False) -> None:
        super().__init__()
        if learnable:
            self.beta = nn.Parameter(torch.as_tensor(beta).detach().clone())
        elif isinstance(beta, Tensor):
            self.register_buffer("beta", beta)
        else:
            self.beta = float(beta)

    def forward(self, x: Tensor) -> Tensor:
        """``x * sigmoid(beta * x)``, in the shape and dtype of ``x``."""
        return swish(x, self.beta)

    def extra_repr(self) -> str:
        """``beta`` when it is a constant."""
        return "" if isinstance(self.beta, Tensor) else f"beta={self.beta}"


def _scaled(x: Tensor, beta: float | Tensor) -> Tensor:
    return x if not isinstance(beta, Tensor) and beta == 1 else beta * x


class _Swish(torch.autograd.Function):
    """Saves ``x`` (and a tensor ``beta``); everything else is computed again in backward.

    There is no forward-mode rule: torch.compile does not take a Function that has one, and without it jvp raises.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beta: float | Tensor) -> Tensor:
        scaled = _scaled(x, beta)
        if torch.compiler.is_compiling():  # PyTorch 2.11 loses the gradient of what is written in place in here
            return torch.sigmoid(scaled) * x
        gate = torch.sigmoid(scaled) if scaled is x else scaled.sigmoid_()
        return gate.mul_(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, beta = inputs
        tensors = (x, beta) if isinstance(beta, Tensor) else (x,)
        ctx.save_for_backward(*tensors)
        ctx.beta = None if isinstance(beta, Tensor) else beta

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, beta = _saved(ctx)
        slopes = _slopes if torch.is_grad_enabled() else _slopes_in_place
        return slopes(grad, x, beta, ctx.needs_input_grad)


Slopes = tuple[Tensor | None, Tensor | None]


def _saved(ctx: Any) -> tuple[Tensor, float | Tensor]:
    return ctx.saved_tensors if ctx.beta is None else (*ctx.saved_tensors, ctx.beta)


def _slopes(grad: Tensor, x: Tensor, beta: float | Tensor, needs: tuple[bool, ...]) -> Slopes:
    """The gradients as a formula that autograd can differentiate again (double backward, torch.func)."""
    scaled = beta * x
    gate = torch.sigmoid(scaled)
    slope = gate * (1 - gate)
    to_x = _reduced(grad * (gate + scaled * slope), x) if needs[0] else None
    to_beta = _reduced(grad * x * x * slope, beta) if needs[1] and isinstance(beta, Tensor) else None
    return to_x, to_beta


def _slopes_in_place(grad: Tensor, x: Tensor, beta: float | Tensor, needs: tuple[bool, ...]) -> Slopes:
    """The same gradients, never holding more than two tensors of the size of ``x``, results included."""
    to_beta = None
    if needs[1] and isinstance(beta, Tensor):
        gate = (beta * x).sigmoid_()
        weight = (grad * x).mul_(x).mul_(gate)
        weight.mul_(gate.neg_().add_(1))
        del gate
        to_beta = _reduced(weight, beta)
        del weight
    # d/dx [x * sigmoid(beta * x)] is the derivative of silu at beta * x.
    to_x = _reduced(torch.ops.aten.silu_backward(grad, _scaled(x, beta)), x) if needs[0] else None
    return to_x, to_beta


def _reduced(gradient: Tensor, like: Tensor) -> Tensor:
    """``gradient`` summed over broadcast dimensions, in the dtype of ``like``."""
    return gradient.sum_to_size(like.shape).to(like.dtype)
