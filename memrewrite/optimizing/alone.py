"""One process plans a tensor-parallel model for all, while none of the others is there to speak to.

A model that is still to be parallelized is planned as a copy that is, by the model's own plan. What comes of that are
programs, which the model itself is then given: the layers that the plan divides are calls in them.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.torch_internals.fsdp import units
from memrewrite.torch_internals.mesh_groups import device_mesh, device_meshes, speaking_to_nobody
from memrewrite.torch_internals.module_trees import copied, with_own_hooks
from memrewrite.torch_internals.tensor_parallel import parallelize
from memrewrite.workload.hooks import without_hooks
from memrewrite.workload.sharding import refuse_tensor_parallel
from memrewrite.workload.step import device_of
from memrewrite.workload.workload import Workload


@contextlib.contextmanager
def alone(work: Workload) -> Iterator[Workload]:
    """What to plan meanwhile: the workload as it is, or that of a copy of its model that is parallelized."""
    mesh = work.step.mesh
    if not isinstance(mesh, Fsdp | Tp) or not mesh.divides_layers:
        yield work
        return
    with speaking_to_nobody(mesh.processes):
        yield work if mesh.applied else _parallelized(work, mesh)


def is_to_be_parallelized(work: Workload) -> bool:
    """Whether that of a copy is planned."""
    mesh = work.step.mesh
    return isinstance(mesh, Fsdp | Tp) and mesh.divides_layers and not mesh.applied


def copy_of(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy without hooks of its own, of parameters that ``change`` makes, with buffers of its own."""
    model = without_hooks(model)
    made = copied(model, change, with_own_hooks)
    buffers = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    for module in model.modules():
        twin, forward = made[id(module)], vars(module).get("forward")
        twin._buffers.update({k: buffers[id(each)] for k, each in twin._buffers.items() if each is not None})
        if isinstance(forward, types.MethodType):  # one that was put on the object
            vars(twin)["forward"] = types.MethodType(forward.__func__, twin)
    return made[id(model)]


def _parallelized(work: Workload, mesh: Fsdp | Tp) -> Workload:
    kind, model = device_of(work.model, work.inputs).type, copy_of(work.model, lambda parameter: parameter.detach())
    applied: Fsdp | Tp
    if isinstance(mesh, Tp):
        devices, rewritten = device_mesh(kind, dist.group.WORLD), [model]
        applied = replace(mesh, applied=True)
    else:
        sharding, devices = device_meshes(mesh, kind, dist.new_group)
        applied, rewritten = replace(mesh, devices=(sharding, devices)), [model, *units(model, mesh)]
    model = parallelize(model, devices, rewritten)
    refuse_tensor_parallel(model, applied)
    return replace(work, model=model, step=replace(work.step, mesh=applied))
