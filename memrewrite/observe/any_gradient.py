"""What a graph does where everything that can have a gradient has one: whoever calls the result may choose."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.observe.effects import Effects, observe
from memrewrite.records.errors import CaptureError, first_line
from memrewrite.targets.eager import EAGER, Target
from memrewrite.torch_internals.logs import untold_failures


def observe_trained(
    module: nn.Module,
    graph_module: fx.GraphModule,
    example: list[Any],
    step_effects: Effects,
    amp: torch.dtype | None = None,
    grad: bool = True,
    target: Target = EAGER,
    before: Effects | None = None,
) -> Effects:
    """``observe`` a graph of ``module`` as if all inputs and parameters required gradients.

    ``step_effects`` are of the same graph in its own step, or of what it was made of; parameters that it writes stay
    frozen, as PyTorch demands.
    Raises ``CaptureError`` where the model itself does not run so: it writes one of several views of an input, say.
    """
    leaves = [t.detach().requires_grad_(_differentiable(t)) if isinstance(t, Tensor) else t for t in example]
    with _all_trained(module, _written(step_effects)), untold_failures():
        try:
            return observe(graph_module, leaves, amp, grad, target, before)
        except RuntimeError as error:  # PyTorch's rules for writing in place what has a gradient
            reason = first_line(error).split(". ", 1)[0]
            raise CaptureError(
                f"{type(module).__name__} does not run where all its inputs and parameters need gradients: {reason}."
            ) from error


def _written(effects: Effects) -> set[str]:
    """The paths of parameters that forward writes, which PyTorch allows only where they require no gradient."""
    attributes = (node for node in effects.order if node.op == "get_attr")
    return {str(node.target) for node in attributes if effects.of[node].outputs & effects.written}


@contextmanager
def _all_trained(module: nn.Module, written: set[str]) -> Iterator[None]:
    names = module.named_parameters(remove_duplicate=False)
    spared = {id(parameter) for name, parameter in names if name in written}
    frozen = [p for p in module.parameters() if not p.requires_grad and _differentiable(p) and id(p) not in spared]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _differentiable(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()
