"""The groups of device meshes, others for a while: of a model that is planned by one process, or proved by all of them.

A module that ``parallelize_module`` was called of holds its ``DeviceMesh`` in closures of its hooks, so it cannot be
given another one; but whatever its processes say to each other they say in the group whose name the mesh has. Read in
PyTorch 2.11 to 2.15.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from memrewrite.records.errors import UsageError
from memrewrite.torch_internals.groups import alone_among
from memrewrite.torch_internals.patches import process_wide

_NAMES = "_dim_group_names"
_NUMBERS = itertools.count()


def device_mesh(device_type: str, group: Any) -> Any:
    """A mesh of the processes of ``group``; no other has its name.

    What is kept of a mesh is kept of all that are alike, and its group will be gone.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"tp {next(_NUMBERS)}",))


@process_wide
@contextlib.contextmanager
def meshes_in(group: Any) -> Iterator[None]:
    """Let the processes of every mesh of one dimension and as many processes as ``group`` speak in that one."""
    from torch.distributed.device_mesh import DeviceMesh

    name, size = group.group_name, group.size()

    def read(mesh: Any) -> list[str]:
        names: list[str] = vars(mesh)[_NAMES]
        return [name] if len(names) == 1 and mesh.size() == size else names

    def write(mesh: Any, names: list[str]) -> None:
        vars(mesh)[_NAMES] = names

    with mock.patch.object(DeviceMesh, _NAMES, property(read, write), create=True):
        yield


@process_wide
@contextlib.contextmanager
def speaking_to_nobody(size: int) -> Iterator[None]:
    """Let meshes of ``size`` processes speak to none: what they would be sent is made of what this one has.

    Raises ``UsageError`` for what is sent in another group, where this process would wait for the others.
    """
    with alone_among(size), meshes_in(dist.group.WORLD), _no_other_groups():
        yield


@contextlib.contextmanager
def _no_other_groups() -> Iterator[None]:
    from torch.distributed import distributed_c10d as c10d

    internals: Any = c10d
    outside: Callable[[Any], bool] = internals._rank_not_in_group  # which every collective asks first

    def asked(group: Any) -> bool:
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER and group not in internals._pg_map:
            raise UsageError(
                "The model sends in a process group that a hook or its forward holds, where the other processes do not "
                "wait while one plans for all; let it ask its DeviceMesh for the group in each call (get_group())."
            )
        return outside(group)

    with mock.patch.object(internals, "_rank_not_in_group", asked):
        yield
