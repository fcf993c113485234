"""Inputs that are parts of larger tensors, which live as long as they do and count as a whole."""

from collections import Counter

import torch
from torch import nn

from memrewrite.records.options import format_bytes
from memrewrite.workload.step import Inputs, Step, device_of

_PART = (
    "An input of {own} is a part of a tensor of {whole}, which lives as long as that does and counts as a whole; if "
    "batches of your loop are tensors of their own, give a copy (clone())."
)


def told_of_parts(step: Step, model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """What to say where most of what an input lies in is not its own, and is not left behind on another device."""
    if step.target.moves(device_of(model, inputs).type):
        return ()
    own, whole = Counter[int](), dict[int, int]()
    for tensor in inputs.tensors():
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            own[storage.data_ptr()] += tensor.nbytes
            whole[storage.data_ptr()] = storage.nbytes()
    parts = ((own[place], size) for place, size in whole.items() if size > 2 * own[place])
    return tuple(_PART.format(own=format_bytes(part), whole=format_bytes(size)) for part, size in parts)[:1]
