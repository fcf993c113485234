"""The inputs of a step, also with another batch size, for simulating it: no memory is needed for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memrewrite.simulate.fake.constant_values import LIMIT
from memrewrite.workload.step import Inputs


def at_batch(inputs: Inputs, batch_size: int) -> Inputs:
    """The inputs with ``batch_size`` samples, for simulating: tensors whose values do not matter are on no device.

    Values matter to models that ask for them, which they do of small tensors of whole numbers.
    The inputs stay as they are where none has a batch.
    """
    common = inputs.batch_size

    def without_memory(leaf: Tensor) -> Tensor:
        numbers = leaf.numel() // common * batch_size
        if numbers <= LIMIT and not (leaf.is_floating_point() or leaf.is_complex()):
            return torch.cat([leaf.detach()] * -(-batch_size // common))[:batch_size].clone()
        form = torch.empty_like(leaf, device="meta")  # dense, with strides in the order of the example's
        outermost = all(form.stride(0) >= stride for stride in form.stride())
        sizes = (batch_size, *leaf.shape[1:])
        strides = form.stride() if outermost else torch.empty(sizes, device="meta").stride()
        resized = torch.empty_strided(sizes, strides, dtype=leaf.dtype, device="meta")
        return resized.requires_grad_(leaf.requires_grad)

    return inputs.changed_in_batch(without_memory)


@dataclass(frozen=True)
class Form:
    """Inputs that take no memory on a device: ``inputs`` lie on none, or on the CPU where their values may matter.

    ``devices`` says of each of their tensors where it belongs.
    """

    inputs: Inputs
    devices: tuple[torch.device, ...]

    def placed(self, inputs: Inputs) -> Inputs:
        """``inputs`` that were made of these, on their devices where they have values."""
        pairs = zip(inputs.tensors(), self.devices, strict=True)
        there = {id(leaf): leaf if leaf.is_meta else leaf.to(device) for leaf, device in pairs}
        return inputs.changed(lambda leaf: there[id(leaf)])


def form_of(inputs: Inputs) -> Form:
    """What is left of inputs, for simulating, when they themselves are gone: the values of small whole numbers."""

    def form(leaf: Tensor) -> Tensor:
        values = leaf.numel() <= LIMIT and not (leaf.is_floating_point() or leaf.is_complex())
        if values or leaf.layout is not torch.strided:
            return leaf.detach().to("cpu", copy=True)
        return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)

    return Form(inputs.changed(form), tuple(leaf.device for leaf in inputs.tensors()))


def part_of(inputs: Inputs, share: float) -> Inputs:
    """The first samples of the batch, as views: the inputs themselves where there is no batch, or one of a sample."""
    common = inputs.batch_size

    def cut(leaf: Tensor) -> Tensor:
        return leaf.detach()[: max(1, int(share * common))].requires_grad_(leaf.requires_grad)

    return inputs.changed_in_batch(cut)
