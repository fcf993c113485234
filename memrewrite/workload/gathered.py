"""A sharded model as it is while it runs: whole parameters in the type that they are gathered in, inputs cast to it.

    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

runs ``layer`` with parameters and inputs in bf16, which is how it is captured.
"""

from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.mesh import Fsdp, Mesh
from memrewrite.torch_internals.fsdp import DTYPES, ignored, units
from memrewrite.torch_internals.module_trees import copied, with_own_hooks
from memrewrite.torch_internals.pytrees import tree_map
from memrewrite.workload.step import Inputs


def is_cast(mesh: Mesh | None) -> bool:
    """Whether the parts of a model run in other types in this mesh than without."""
    return isinstance(mesh, Fsdp) and (mesh.param_dtype, mesh.output_dtype) != (None, None)


def as_gathered(model: nn.Module, mesh: Mesh | None) -> nn.Module:
    """The model as it runs in a mesh: itself, or a copy with its buffers, parameters of that type, and casts."""
    if not isinstance(mesh, Fsdp) or not is_cast(mesh):
        return model
    param, output, given = DTYPES[mesh.param_dtype], DTYPES[mesh.output_dtype], _given_as(mesh)
    whole = {id(parameter) for parameter in ignored(model, mesh)}
    made = copied(model, lambda each: _to(each.detach(), None if id(each) in whole else param), with_own_hooks)
    for unit in [*units(model, mesh), model]:
        running = made[id(unit)]
        running.register_forward_pre_hook(
            lambda module, args, kwargs: tree_map(lambda leaf: _to(leaf, given), (args, kwargs)), with_kwargs=True
        )
        running.register_forward_hook(lambda module, args, out: tree_map(lambda leaf: _to(leaf, output), out))
    return made[id(model)]


def cast_inputs(inputs: Inputs, mesh: Mesh | None) -> Inputs:
    """The inputs as the model finds them in a mesh."""
    dtype = _given_as(mesh) if isinstance(mesh, Fsdp) else None
    args, kwargs = tree_map(lambda leaf: _to(leaf, dtype), (inputs.args, inputs.kwargs))
    return Inputs(args, kwargs)


def without_casts(unit: nn.Module) -> nn.Module:
    """The part of such a copy that its casts are around."""
    result = object.__new__(type(unit))
    hooks = {name: type(vars(unit)[name])() for name in ("_forward_pre_hooks", "_forward_hooks")}
    with_kwargs: dict[str, Any] = {"_forward_pre_hooks_with_kwargs": type(unit._forward_pre_hooks_with_kwargs)()}
    vars(result).update({**vars(unit), **hooks, **with_kwargs})
    return result


def _given_as(mesh: Fsdp) -> torch.dtype | None:
    """What units cast their inputs to."""
    return DTYPES[mesh.param_dtype] if mesh.cast_inputs else None


def _to(leaf: Any, dtype: torch.dtype | None) -> Any:
    cast = dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not dtype
    return leaf.to(dtype) if cast else leaf
