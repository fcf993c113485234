"""Is a call one that a ``Program`` is right for? Torch only; part of every artifact."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memrewrite.runtime.differences import described, divided, sizes_of
from memrewrite.runtime.guards import Guards
from memrewrite.runtime.parameters import Parameters
from memrewrite.runtime.segment import OWN, autocast_dtype


def gradients_now(module: nn.Module, tensors: Iterable[Tensor]) -> tuple[bool, ...]:
    """Whether gradients are on, and of each input and parameter whether it needs one."""
    return (torch.is_grad_enabled(), *(t.requires_grad for t in itertools.chain(tensors, module.parameters())))


def layouts_now(module: nn.Module, tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    """How each input, parameter and buffer lies in memory: its dimensions from the outermost, or with gaps its strides.

    Those of other kinds (sparse ones, say) lie in no order.
    """
    every = itertools.chain(tensors, module.parameters(), module.buffers())
    return tuple(_layout(tensor) if tensor.layout is torch.strided else () for tensor in every)


def _layout(tensor: Tensor) -> tuple[int, ...]:
    strides, step = tensor.stride(), 1
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and strides[dim] != step:
            return strides
        step *= tensor.shape[dim]
    return tuple(order)


def one_tensor(leaves: list[Any]) -> tuple[tuple[int, int], ...]:
    """The positions of tensors that are one object: that of each further one, after that of the first."""
    firsts = [next(k for k, other in enumerate(leaves) if other is leaf) for leaf in leaves]
    return tuple((k, i) for i, k in enumerate(firsts) if k != i and isinstance(leaves[i], Tensor))


def values_of(module: nn.Module, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a call of a drop-in gives the parameters that its program names, in order; None where it fills others.

    Of a forward that does not name them, it is the arguments as they are.
    """
    parameters: Parameters = getattr(type(module), OWN).parameters
    return parameters.values(program.names, args, kwargs) if program.names else (args, kwargs)


def specs_of_tensors(leaves: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """What a program says of the tensors among its inputs: type, kind of device and sizes."""
    return (spec for spec in leaves if spec[0] not in ("constant", "number"))


def sizes_in(program: Any, tensors: Iterable[Tensor]) -> dict[str, int]:
    """The named sizes of a call with these tensors."""
    shapes = (spec[2] for spec in specs_of_tensors(program.leaves))
    named = (zip(shape, tensor.shape, strict=True) for tensor, shape in zip(tensors, shapes, strict=True))
    return {name: size for pairs in named for name, size in pairs if isinstance(name, str)}


def numbers_of(
    module: nn.Module, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, float]]:
    """The numbers that vary, by name, in a call that a program is right for: it is given them after the tensors."""
    if all(spec[0] != "number" for spec in program.leaves):
        return []
    pairs = zip(program.leaves, tree_leaves(values_of(module, program, args, kwargs)), strict=True)
    return [(spec[2], leaf) for spec, leaf in pairs if spec[0] == "number"]


def name_of_class(kind: type) -> str:
    """The name of a class that a program cannot refer to, as there may be none where it runs."""
    return f"{kind.__module__}.{kind.__qualname__}"


def match(program: Any, module: nn.Module, leaves: list[Any]) -> tuple[list[Tensor] | None, str]:
    """The tensors of a call with these leaves that the program is right for; else None and why."""
    tensors: list[Tensor] = []
    sizes: dict[str, float] = {}
    numbers: list[str] = []
    names = program.names if len(program.names) == len(leaves) else itertools.repeat("an argument", len(leaves))
    for name, leaf, spec in zip(names, leaves, program.leaves, strict=True):
        if spec[0] == "constant":
            alike = type(leaf) is type(spec[1]) if len(spec) == 2 else name_of_class(type(leaf)) == spec[2]
            if not alike or leaf != spec[1]:
                return None, f"{name} is {leaf!r}, captured as {' '.join([*spec[2:], repr(spec[1])])}"
            continue
        if spec[0] == "number":
            if type(leaf) is not spec[1] or sizes.setdefault(spec[2], leaf) != leaf:
                return None, f"{name} is {leaf!r}, captured for another {spec[1].__name__}"
            numbers.append(f"{name}={leaf!r}")
            continue
        dtype, device, shape = spec
        fits = isinstance(leaf, Tensor) and (leaf.device.type, leaf.dim()) == (device, len(shape))
        if not fits or (leaf.dtype != dtype and (program.types or not _cast_anyway(leaf, dtype))):
            return None, f"an input is {described(leaf)}, captured as {dtype} {tuple(shape)} on {device}"
        for size, expected in zip(leaf.shape, shape, strict=True):
            if isinstance(expected, str):
                what, least, most = program.ranges.get(expected, ("", 0, 0))
                if size < least:
                    return None, f"{what} is {size}, and the range that was asked for is {least} to {most}"
                if size < 2 or sizes.setdefault(expected, size) != size:
                    return None, f"an input is {described(leaf)}, captured as {tuple(shape)}"
            elif size != expected:
                return None, f"an input is {described(leaf)}, captured as {tuple(shape)}"
        tensors.append(leaf)
    if program.shared is not None and program.shared != one_tensor(leaves):
        return None, "it asks whether inputs are one tensor, and others are than at capture"
    if not program.fits(**sizes):
        shapes = ", ".join(dict.fromkeys([*map(sizes_of, tensors), *numbers]))
        return None, f"for inputs of {shapes} forward takes another path than at capture"
    reason = _otherwise(program, module, tensors)
    return (None, reason) if reason else (tensors, "")


def _otherwise(program: Any, module: nn.Module, tensors: list[Tensor]) -> str:
    """What a program depends on, besides sizes, that is otherwise in a call with these tensors; "" for nothing."""
    weight = next(module.parameters(), None)
    of_units: Guards | None = getattr(type(module), OWN).guards  # where the first one may not be gathered by now
    if weight is not None and weight.dtype != program.dtype and not (of_units and of_units.gathered):
        return f"the parameters are {weight.dtype}, captured as {program.dtype}"
    if program.divided and not divided(getattr(type(module), OWN).owners, program.divided):
        return f"{program.divided} is whole, and was planned for after parallelize_module"
    if program.autocast != "any":
        now = autocast_dtype(next((t.device.type for t in (weight, *tensors) if t is not None), "cpu"))
        if now != program.autocast:
            return f"it depends on autocast, which casts to {now} now and to {program.autocast} at capture"
    if program.gradients is not None and program.gradients != gradients_now(module, tensors):
        return "it asks whether tensors need gradients, and others do now than at capture"
    if program.layouts is not None and program.layouts != layouts_now(module, tensors):
        return "it asks how tensors lie in memory, and inputs or weights lie otherwise than at capture"
    return ""


def _cast_anyway(leaf: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast makes of this input what it makes of one of ``dtype`` (values between regions are its own)."""
    return leaf.is_floating_point() and dtype.is_floating_point and torch.is_autocast_enabled(leaf.device.type)
