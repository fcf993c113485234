"""Sums that transformers' tensor parallelism makes, and PyTorch has no ``ParallelStyle`` for.

    hidden, index, weights -> experts(hidden, index, weights)  # of a part of their inner width, summed in place
    hidden -> split(latent(hidden))  # of attention's latents, of which the last ones go to the heads of each process

The sums are those of ``transformers.distributed.parallel_utils``: what comes out of experts is summed where it lies,
and so are, in backward, the gradients of what goes in, or of the last latents.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memrewrite.torch_internals.pytrees import tree_map


def sum_around(experts: nn.Module, group: Any) -> None:
    """Let the processes of ``group`` sum what ``experts`` puts out, and the gradients of what it is given."""

    def sent(leaf: Any) -> Any:
        trains = torch.is_grad_enabled() and isinstance(leaf, Tensor) and leaf.requires_grad
        return _GradientSummed.apply(leaf, group) if trains else leaf  # type: ignore[no-untyped-call]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(sent, (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return _Summed.apply(output, group)  # type: ignore[no-untyped-call]

    experts.register_forward_pre_hook(enter, with_kwargs=True)
    experts.register_forward_hook(leave)


def sum_gradients_of_last(latent: nn.Module, width: int, group: Any) -> None:
    """Let the processes of ``group`` sum the gradients of the last ``width`` numbers of what ``latent`` puts out."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if not (torch.is_grad_enabled() and output.requires_grad):
            return output
        others, last = output.split([output.shape[-1] - width, width], dim=-1)
        return torch.cat([others, _GradientSummed.apply(last, group)], dim=-1)  # type: ignore[no-untyped-call]

    latent.register_forward_hook(leave)


class _Summed(torch.autograd.Function):
    """The sum of all processes, in place; the gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _GradientSummed(torch.autograd.Function):
    """The tensor itself; its gradient is the sum of those of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
