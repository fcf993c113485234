"""Models that are spread over several processes: what DDP wraps is taken out and wrapped again, FSDP1 is refused."""

import sys
import types
from typing import TypeVar

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Ddp, Fsdp, Mesh, Tp
from memrewrite.records.options import format_bytes
from memrewrite.runtime.dropin import own, programs, rewrite
from memrewrite.runtime.guards import hooks_of
from memrewrite.torch_internals.fsdp import units
from memrewrite.torch_internals.fsdp_states import is_sharded, mesh_of, unsharded
from memrewrite.torch_internals.spread import spreads
from memrewrite.torch_internals.tensor_parallel import applied, refuse_uneven

M = TypeVar("M", bound=nn.Module)
_FSDP = "torch.distributed.fsdp"  # not imported for a model that has none of it
_BUCKETS = (
    'If the result is wrapped in DistributedDataParallel, give mesh="ddp={size}": its buckets take up to {bytes} more '
    "than is predicted, a copy of every gradient."
)
_UNSUPPORTED = "which is not supported yet: a budget is that of one device; leave such a model as it is, or plan before"
# Arguments of DistributedDataParallel that change what it takes, and that a mesh cannot say, by attribute.
_UNKNOWN = {
    "mixed_precision": "mixed_precision",
    "batched_grad_copy": "batched_grad_copy",
    "_delay_all_reduce_params": "delay_all_reduce_named_params",
    "bucket_bytes_cap_list": "bucket_cap_mb_list",
}


def unwrapped(model: nn.Module, mesh: str | Mesh | None, together: bool = False) -> tuple[nn.Module, Mesh | None]:
    """The model that DDP wraps, with the mesh that the wrapper means; any other model with the mesh that is given.

    Of a model that is sharded it is a copy of the model as it was before, with other numbers, or with none where the
    first process plans for all ``together``; one that was parallelized stays as it is.
    Raises ``UsageError`` for a mesh beside a wrapped model, for a wrapper of which it is not known what it takes, and
    for what is no model.
    """
    if not isinstance(model, nn.Module):
        what = f"The class {model.__name__}" if isinstance(model, type) else f"A {type(model).__name__}"
        raise UsageError(f"{what} is no model; give an object of a torch.nn.Module class.")
    if is_sharded(model):
        if mesh is not None:
            raise UsageError("The model is sharded by fully_shard, which says its mesh; leave out mesh.")
        if not model.training:
            raise UsageError("A model that fully_shard has sharded is planned in training; call train() on it first.")
        return _before_sharding(model, together)
    if not isinstance(model, DistributedDataParallel):
        return model, _asked(mesh, applied(model))
    if mesh is not None:
        raise UsageError("The model is wrapped in DistributedDataParallel, which says its mesh; leave out mesh.")
    if not model.training:
        raise UsageError("DistributedDataParallel is for training; for inference optimize the model inside (.module).")
    if model.static_graph:
        raise UsageError(
            "The model is wrapped in DistributedDataParallel with static_graph, whose first step must be the loop's "
            f'own; optimize the model inside (.module) with mesh="ddp={model.process_group.size()},static-graph", then '
            "wrap the result."
        )
    return model.module, mesh_of_wrapper(model)


def mesh_of_wrapper(model: DistributedDataParallel) -> Ddp:
    """The mesh that a wrapper means; raises ``UsageError`` where it is not known what it takes."""
    for attribute, argument in _UNKNOWN.items():
        if getattr(model, attribute, None):
            raise UsageError(f"What DistributedDataParallel takes with {argument} is not known; wrap without it.")
    hooks = model._comm_hooks
    return Ddp(
        model.process_group.size(),
        None if model.bucket_bytes_cap_default else model.bucket_bytes_cap / 2**20,
        model.gradient_as_bucket_view,
        model.static_graph,
        model.find_unused_parameters,
        model.broadcast_buffers,
        (hooks[0][1], hooks[0][0]) if hooks else None,
    )


def _asked(mesh: str | Mesh | None, found: Tp | None) -> Mesh | None:
    """The mesh that is given, where the model is not in one."""
    if found is not None and mesh is not None and mesh != found:
        raise UsageError("The model is parallelized by parallelize_module, which says its mesh; leave out mesh.")
    return found if mesh is None else Mesh.parse(mesh)


def refuse_tensor_parallel(model: nn.Module, mesh: Mesh | None) -> None:
    """Raise ``UsageError`` for a mesh in which a model is not rewritten."""
    if not isinstance(mesh, Fsdp | Tp) or not mesh.divides_layers:
        return
    count = processes()
    if count not in (1, mesh.processes) and not mesh.applied:
        raise UsageError(
            f"The mesh {mesh} has {mesh.processes} processes, and here are {count}; start as many, or plan in one."
        )
    if count not in (1, mesh.processes):
        raise UsageError(
            f"The model is tensor parallel among {mesh.processes} of {count} processes, which would not have the same "
            "plan; it can be optimized where all of them have a part of it."
        )
    if not mesh.applied:
        return
    refuse_uneven(model, mesh.tp if isinstance(mesh, Fsdp) else mesh.size)
    for path, module in model.named_modules():
        if path and not isinstance(vars(module).get("forward", model.forward), types.MethodType):
            raise UsageError(
                f"The forward of {path} was put on the object, as transformers' own tensor parallelism does it, and "
                "what it sends is not known; load the model without that, and call parallelize_module or give mesh="
                f'"{mesh}".'
            )
    _refuse_styles("the model itself", model)
    for unit in units(model, mesh) if isinstance(mesh, Fsdp) else ():
        _refuse_styles("a unit of fully_shard", unit)


def _refuse_styles(what: str, module: nn.Module) -> None:
    """Raise ``UsageError`` where hooks divide what a module that is rewritten is given, or gives."""
    if any(map(spreads, hooks_of(module))):
        name = type(module).__name__
        raise UsageError(
            f"parallelize_module gave {what} ({name}) a style, and only modules inside of it keep theirs when it is "
            f"rewritten; put it into another module, nn.Sequential({name}) say, and optimize that."
        )


def processes() -> int:
    """How many processes there are with this one, by the process group that it is in."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _before_sharding(model: nn.Module, together: bool) -> tuple[nn.Module, Mesh]:
    found, group = mesh_of(model), torch.distributed
    alone = group.get_backend() == "fake"  # where no other process is there to plan
    if not alone and group.get_world_size() != found.processes:
        raise UsageError(
            f"The model is sharded among {found.processes} of {group.get_world_size()} processes; it can be optimized "
            "where all of them have a part of it."
        )
    return unsharded(model, empty=together and group.get_rank() > 0 and not alone), found


def wrapped_like(model: M, result: nn.Module) -> M | nn.Module:
    """``result``, wrapped as ``model`` wraps what it was made of: by the same reducer, of the same parameters.

    A sharded model is given the programs of the result itself, and is what comes back.
    """
    if is_sharded(model):
        for path, program in programs(result).items():
            kept = own(result.get_submodule(path))
            rewrite(model.get_submodule(path), program, {} if kept is None else kept.constants)
        return model
    if not isinstance(model, DistributedDataParallel):
        return result
    if result is model.module:
        return model
    wrapper: M = object.__new__(type(model))
    vars(wrapper).update(vars(model))
    vars(wrapper)["_modules"] = {"module": result}
    return wrapper


def refuse_compiled(model: nn.Module) -> None:
    """Raise ``UsageError`` for what ``torch.compile`` made of a model, or of a part that copies would go on calling."""
    if "_orig_mod" in model._modules:
        raise UsageError("The model is compiled; give the one inside (._orig_mod), and compile the result.")
    for path, module in model.named_modules():
        if path and ("_orig_mod" in module._modules or module._compiled_call_impl is not None):
            inner: nn.Module = module._modules.get("_orig_mod") or module
            raise UsageError(
                f"{path} ({type(inner).__name__}) is compiled; optimize the model before parts of it are compiled, and "
                "compile those of the result, or all of it."
            )


def refuse_sharded(model: nn.Module) -> None:
    """Raise ``UsageError`` for a model that FSDP shards, or parts of which run on several devices."""
    for path, module in model.named_modules():
        where = f"{path} ({type(module).__name__})" if path else type(module).__name__
        if isinstance(module, DistributedDataParallel | DataParallel):
            inner = ".".join(filter(None, [path, "module"]))
            raise UsageError(
                f"{where} is a wrapper that runs its model on several devices; optimize the model inside (.{inner}) "
                "and wrap the result."
            )
        if is_sharded(module):
            raise UsageError(
                f"{where} was sharded by fully_shard (FSDP2), and the model was not; shard that last, too."
            )
        if _is_a(module, _FSDP, "FullyShardedDataParallel"):
            raise UsageError(f"{where} is a FullyShardedDataParallel (FSDP1), {_UNSUPPORTED} wrapping it.")


def bucket_notes(model: nn.Module) -> tuple[str, ...]:
    """What DDP's buckets would add to a step without a mesh, where several processes train; nothing elsewhere."""
    count = processes()
    if count == 1:
        return ()
    size = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return (_BUCKETS.format(bytes=format_bytes(size), size=count),) if size else ()


def _is_a(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
