"""Example inputs brought to the largest sizes of the ranges that the user names."""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.records.ranges import Range
from memrewrite.torch_internals.pytrees import tree_flatten, tree_unflatten
from memrewrite.workload.input_text import did_you_mean
from memrewrite.workload.step import Inputs


def enlarged(model: nn.Module, inputs: Inputs, ranges: Sequence[Range]) -> tuple[Inputs, tuple[Range, ...]]:
    """The inputs at the largest size of each range, and all ranges there are then.

    Values are repeated along the dimension and cut, so that tokens stay tokens. With a named input are enlarged, and
    get its range, all inputs that hold something for each token (whole numbers or truth values of more than one
    dimension) and have the same size at the same dimension, and for dimension 0, the batch, all that have that size
    there; each unless it is named itself.
    Raises ``UsageError`` for a name or a dimension that there is not, and for one without any element.
    """
    if not ranges:
        return inputs, ()
    leaves, tree = tree_flatten((inputs.args, inputs.kwargs))
    named = {name: leaves[i] for name, i in positions(model, inputs).items() if isinstance(leaves[i], Tensor)}
    for each in ranges:
        _check(each, named, type(model).__name__)
    everything = (*ranges, *_implied(ranges, named))
    sizes: dict[int, dict[int, int]] = defaultdict(dict)
    for each in everything:
        wanted = sizes[id(named[each.name])]  # a tensor may have several names
        wanted[each.dim] = max(each.most, wanted.get(each.dim, 0))
    resized = {id(tensor): brought_to(tensor, sizes[id(tensor)]) for tensor in named.values()}
    return Inputs(*tree_unflatten([resized.get(id(leaf), leaf) for leaf in leaves], tree)), everything


def positions(model: nn.Module, inputs: Inputs) -> dict[str, int]:
    """Where each argument that is a value by itself stands among the leaves of ``(args, kwargs)``, by its name.

    Raises ``UsageError`` where the inputs do not fit the signature of forward.
    """
    signature = inspect.signature(model.forward)
    leaves, tree = tree_flatten((inputs.args, inputs.kwargs))
    args, kwargs = tree_unflatten(range(len(leaves)), tree)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UsageError(f"The example inputs do not fit forward{signature}: {error}.") from None
    keywords = {name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD}
    found = {name: value for name, value in bound.items() if name not in keywords}
    for name in keywords & bound.keys():
        found |= bound[name]
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _check(wanted: Range, named: Mapping[str, Tensor], model: str) -> None:
    if wanted.name not in named:
        hint = did_you_mean(wanted.name, list(named))
        raise UsageError(f"Range {wanted} names no tensor that forward of {model} is called with; {hint}")
    tensor = named[wanted.name]
    if wanted.dim >= tensor.dim():
        raise UsageError(f"Range {wanted} has no place: {wanted.name} has {tensor.dim()} dimensions, counted from 0.")
    if not tensor.shape[wanted.dim]:
        raise UsageError(f"Range {wanted} has nothing to begin with: {wanted.words} is 0 in the example.")


def _implied(ranges: Sequence[Range], named: Mapping[str, Tensor]) -> list[Range]:
    known = {(each.name, each.dim) for each in ranges}
    found: dict[tuple[str, int], Range] = {}
    for each in ranges:
        size = named[each.name].shape[each.dim]
        for name, tensor in named.items():
            if (name, each.dim) in known or tensor.dim() <= each.dim or tensor.shape[each.dim] != size:
                continue
            if each.dim == 0 or per_token(tensor):
                found.setdefault((name, each.dim), replace(each, name=name, implied=True))
    return list(found.values())


def per_token(leaf: Any) -> bool:
    """Whether it holds tokens, or something for each token: whole numbers or truth values in rows."""
    return isinstance(leaf, Tensor) and leaf.dim() > 1 and not (leaf.is_floating_point() or leaf.is_complex())


def brought_to(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """The tensor with its values repeated or cut along some dimensions, in memory as before: channels-last, say."""
    if all(tensor.shape[dim] == size for dim, size in sizes.items()):
        return tensor
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    found = tensor.detach().permute(order)
    for dim, size in sizes.items():
        picked = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        found = found.index_select(order.index(dim), picked)
    back = [order.index(dim) for dim in range(tensor.dim())]
    return found.contiguous().permute(back).requires_grad_(tensor.requires_grad)
