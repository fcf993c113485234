"""A mesh of the processes that are there, with groups of its own, in which models are wrapped for a while.

A process that fails meanwhile is not waited for by gloo: its connections end with the last reference to its group,
which the others notice. NCCL notices nothing before ``PATIENCE`` is over. Read in PyTorch 2.11 to 2.15.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memrewrite.records.mesh import Ddp, Fsdp, Tp
from memrewrite.torch_internals.ddp import wrapped
from memrewrite.torch_internals.fsdp import classes_forgotten, sharded
from memrewrite.torch_internals.mesh_groups import device_mesh, meshes_in
from memrewrite.torch_internals.tensor_parallel import parallelize

PATIENCE = timedelta(minutes=10)
_NUMBERS = itertools.count()


@contextlib.contextmanager
def among_peers(mesh: Ddp | Fsdp | Tp, device_type: str) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Gives what wraps a model, in place where it is sharded, as the processes of ``mesh`` do, which all enter this.

    One that is tensor parallel already is as it is, and speaks in a group of its own meanwhile.

    Nothing that was wrapped may be there any more afterwards, as it has threads of the groups, but for what an error
    holds.
    """
    backend = "gloo" if device_type == "cpu" else None
    made: list[Any] = []

    def group(ranks: list[int]) -> Any:
        made.append(dist.new_group(ranks, timeout=PATIENCE, backend=backend))
        return made[-1]

    try:
        if isinstance(mesh, Ddp):
            whole = group([*range(mesh.size)])
            yield lambda module: wrapped(module, mesh, whole, init_sync=True)
        elif isinstance(mesh, Tp):
            with _tensor_parallel(mesh, device_type, group([*range(mesh.size)])) as wrap:
                yield wrap
        else:
            devices = _devices(mesh, device_type, group)
            with classes_forgotten(), _without_groups_later(devices):
                yield lambda module: sharded(module, mesh, devices)
    finally:
        for each in made:
            if each is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(each)
        made.clear()


@contextlib.contextmanager
def _tensor_parallel(mesh: Tp, device_type: str, group: Any) -> Iterator[Callable[[nn.Module], nn.Module]]:
    if mesh.applied:
        with meshes_in(group):
            yield lambda module: module
        return
    devices = device_mesh(device_type, group)
    with _without_groups_later(devices):
        yield lambda module: parallelize(module, devices, root=False)


@contextlib.contextmanager
def _without_groups_later(devices: Any) -> Iterator[None]:
    """Let a ``DeviceMesh`` have no group afterwards: how its tensors are spread is kept, and keeps the mesh."""
    try:
        yield
    finally:
        vars(devices).get("_pg_registry", {}).clear()


def _devices(mesh: Fsdp, device_type: str, group: Callable[[list[int]], Any]) -> Any:
    """The ``DeviceMesh`` of groups that ``group`` makes, each asked for by all processes in the same order.

    No other has its names: what is kept of a mesh is kept of all that are alike, and its groups will be gone.
    """
    from torch.distributed.device_mesh import DeviceMesh

    number = next(_NUMBERS)
    names = tuple(f"{name} in proof {number}" for name in ("replicate", "shard"))
    rank, size = dist.get_rank(), mesh.size
    rows = [[*range(start, start + size)] for start in range(0, mesh.processes, size)]
    if mesh.replicas == 1:
        return DeviceMesh.from_group(group(rows[0]), device_type, mesh_dim_names=names[1:])
    columns = [list(ranks) for ranks in zip(*rows, strict=True)]
    own = [group_of for ranks in (*columns, *rows) for group_of in [group(ranks)] if rank in ranks]
    return DeviceMesh.from_group(own, device_type, torch.tensor(rows), mesh_dim_names=names)
