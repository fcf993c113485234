"""A mesh of the processes that are there, with groups of its own, in which models are wrapped for a while.

A process that fails meanwhile is not waited for by gloo: its connections end with the last reference to its group,
which the others notice. NCCL notices nothing before ``PATIENCE`` is over. Read in PyTorch 2.11 to 2.15.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from memrewrite.records.mesh import Ddp, Fsdp, Tp
from memrewrite.torch_internals.ddp import wrapped
from memrewrite.torch_internals.fsdp import quietly, sharded, units
from memrewrite.torch_internals.mesh_groups import Ranks, device_mesh, device_meshes, meshes_in
from memrewrite.torch_internals.tensor_parallel import parallelize

PATIENCE = timedelta(minutes=10)


@contextlib.contextmanager
def among_peers(
    mesh: Ddp | Fsdp | Tp, device_type: str, lines: Sequence[Ranks]
) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Gives what wraps a model, in place where it is sharded, as the processes of ``mesh`` do, which all enter this.

    One that is tensor parallel already stays so, and its processes speak in groups of their own meanwhile: where it is
    sharded besides, those of ``lines``, the same in all processes.

    Nothing that was wrapped may be there any more afterwards, as it has threads of the groups, but for what an error
    holds.
    """
    backend = "gloo" if device_type == "cpu" else _of_devices(mesh)
    made: list[Any] = []

    def group(ranks: Sequence[int]) -> Any:
        made.append(dist.new_group([*ranks], timeout=PATIENCE, backend=backend))
        return made[-1]

    try:
        if isinstance(mesh, Ddp):
            whole = group([*range(mesh.size)])
            yield lambda module: wrapped(module, mesh, whole, init_sync=True)
        elif isinstance(mesh, Tp):
            with _tensor_parallel(mesh, device_type, group([*range(mesh.size)])) as wrap:
                yield wrap
        elif mesh.devices is not None:
            sharding, _ = mesh.devices
            with quietly(), meshes_in([each for ranks in lines for each in [group(ranks)] if dist.get_rank() in ranks]):
                yield lambda module: sharded(module, mesh, sharding)
        else:
            sharding, tensors = device_meshes(mesh, device_type, group)
            with quietly(), _without_groups_later(sharding, tensors):
                yield lambda module: sharded(_divided(module, mesh, tensors), mesh, sharding)
    finally:
        for each in made:
            if each is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(each)
        made.clear()


def _of_devices(mesh: Ddp | Fsdp | Tp) -> str | None:
    """NCCL where processes have gloo alone, which is not made for all that units and divided layers send on GPUs."""
    return "nccl" if dist.get_backend() == "gloo" and not isinstance(mesh, Ddp) and dist.is_nccl_available() else None


@contextlib.contextmanager
def _tensor_parallel(mesh: Tp, device_type: str, group: Any) -> Iterator[Callable[[nn.Module], nn.Module]]:
    if mesh.applied:
        with meshes_in([group]):
            yield lambda module: module
        return
    devices = device_mesh(device_type, group)
    with _without_groups_later(devices):
        yield lambda module: parallelize(module, devices, [module])


def _divided(module: nn.Module, mesh: Fsdp, devices: Any) -> nn.Module:
    return module if devices is None else parallelize(module, devices, [module, *units(module, mesh)])


@contextlib.contextmanager
def _without_groups_later(*meshes: Any) -> Iterator[None]:
    """Let each ``DeviceMesh`` have no group afterwards: how its tensors are spread is kept, and keeps the mesh."""
    try:
        yield
    finally:
        for devices in filter(None, meshes):
            for each in (devices, vars(devices).get("_root_mesh") or devices):  # which has those of its parts
                vars(each).get("_pg_registry", {}).clear()
