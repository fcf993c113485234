"""The inputs of a step with another batch size, for simulating it: no memory is needed for them."""

from typing import Any

import torch
from torch import Tensor

from memrewrite.simulate.fake.constant_values import LIMIT
from memrewrite.torch_internals.pytrees import tree_map
from memrewrite.workload.step import Inputs


def at_batch(inputs: Inputs, batch_size: int) -> Inputs:
    """The inputs with ``batch_size`` samples, for simulating: tensors whose values do not matter are on no device.

    Values matter to models that ask for them, which they do of small tensors of whole numbers.
    The inputs stay as they are where none has a batch.
    """
    common = inputs.batch_size

    def without_memory(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != common:
            return leaf
        numbers = leaf.numel() // common * batch_size
        if numbers <= LIMIT and not (leaf.is_floating_point() or leaf.is_complex()):
            return torch.cat([leaf.detach()] * -(-batch_size // common))[:batch_size].clone()
        form = torch.empty_like(leaf, device="meta")  # dense, with strides in the order of the example's
        outermost = all(form.stride(0) >= stride for stride in form.stride())
        sizes = (batch_size, *leaf.shape[1:])
        strides = form.stride() if outermost else torch.empty(sizes, device="meta").stride()
        resized = torch.empty_strided(sizes, strides, dtype=leaf.dtype, device="meta")
        return resized.requires_grad_(leaf.requires_grad)

    return Inputs(tree_map(without_memory, inputs.args), tree_map(without_memory, inputs.kwargs))


def part_of(inputs: Inputs, share: float) -> Inputs:
    """The first samples of the batch, as views: the inputs themselves where there is no batch, or one of a sample."""
    common = inputs.batch_size

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != common:
            return leaf
        return leaf.detach()[: max(1, int(share * common))].requires_grad_(leaf.requires_grad)

    return Inputs(tree_map(cut, inputs.args), tree_map(cut, inputs.kwargs))
