"""What an operator says of itself: its arguments, what it writes, whether it returns a view.

A schema has no public spelling; which argument is the dropout probability, and whether an operator writes its
arguments, are read from it rather than kept in tables by hand. Read in PyTorch 2.11 to 2.15.
"""

import functools
from typing import Any

import torch

from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    from torch._ops import OpOverload, OpOverloadPacket

require("ops.aten.relu.default._schema.arguments", "ops.aten.relu._qualified_op_name", "_C._set_grad_enabled")

__all__ = [
    "C_FUNCTIONS",
    "OpOverload",
    "OpOverloadPacket",
    "aliases_arguments",
    "argument_names",
    "is_mutable",
    "name_of_others",
    "named_arguments",
    "names_of",
    "returns_view",
    "schema_name",
    "set_grad_enabled",
    "written_arguments",
]

# Where the functions live that Dynamo's graphs call by no public name.
C_FUNCTIONS: dict[str, Any] = {
    "torch._C": torch._C,
    **{f"torch._C.{name}": getattr(torch._C, name) for name in ("_nn", "_fft", "_linalg", "_special")},
}

# The namespaces of the operators that come with PyTorch.
_OF_PYTORCH = {
    *("aten", "prim", "prims", "inductor", "inductor_prims", "rngprims", "export", "profiler", "sparse", "_native"),
    *("quantized", "_quantized", "quantization", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "static_runtime"),
    *("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp"),
}

# How a graph by Dynamo spells the borders of no_grad and enable_grad; the public name makes a context manager.
set_grad_enabled = torch._C._set_grad_enabled


def named_arguments(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator call by their schema names, defaults included."""
    formal = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(formal, args, strict=False)}
    return {argument.name: argument.default_value for argument in formal} | given | kwargs


def gives_something(operator: OpOverload) -> bool:
    """Whether the operator returns anything."""
    return bool(operator._schema.returns)


def is_mutable(operator: OpOverload) -> bool:
    """Whether the operator writes one of its arguments."""
    return bool(operator._schema.is_mutable)


def returns_view(operator: OpOverload) -> bool:
    """Whether the operator returns a view of an argument instead of a new tensor or the argument it wrote."""
    aliases = [result.alias_info for result in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def aliases_arguments(operator: OpOverload) -> bool:
    """Whether the operator returns an argument that it wrote, or a view of one."""
    return any(result.alias_info is not None for result in operator._schema.returns)


def written_arguments(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that the operator's schema says it writes."""
    places = _written_places(operator)
    return [args[position] if position < len(args) else kwargs.get(name) for position, name in places]


@functools.cache
def _written_places(operator: OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of what it writes; to ask a schema takes as long as most operators on fake tensors."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def argument_names(operator: OpOverload) -> tuple[str, ...]:
    """The names of the arguments, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


@functools.cache
def taking_the_same(operator: OpOverload, packet: str) -> OpOverload | None:
    """The overload of the ATen operator of that name that takes what this one does; None where there is none.

    It may have another name: what ``pow_.Scalar`` is in place is ``pow.Tensor_Scalar``, and no ``pow.Scalar``.
    """
    others: Any = getattr(torch.ops.aten, packet, None)
    names = [] if others is None else sorted(others.overloads(), key=lambda name: name != operator._overloadname)
    found = (getattr(others, name) for name in names)
    return next((each for each in found if _formal(each) == _formal(operator)), None)


def _formal(operator: OpOverload) -> list[Any]:
    return [(str(each.type), each.default_value) for each in operator._schema.arguments]


def schema_name(operator: OpOverload) -> str:
    """The name with its namespace and without its overload, such as ``aten::native_batch_norm``."""
    return str(operator._schema.name)


def names_of(operator: OpOverload) -> tuple[str, str, str]:
    """Namespace, name and overload: what stands behind ``torch.ops``."""
    return operator.namespace, schema_name(operator).split("::")[1], operator._overloadname


def name_of_others(target: object) -> str:
    """The name of an operator that others registered, such as ``torchvision::nms``; "" for anything else."""
    if isinstance(target, OpOverload):
        name = schema_name(target)
    elif isinstance(target, OpOverloadPacket):
        name = target._qualified_op_name
    else:
        return ""
    return "" if name.partition("::")[0] in {*_OF_PYTORCH, "memrewrite"} else name
