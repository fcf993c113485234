"""The groups of device meshes, others for a while: of a model that is planned by one process, or proved by all of them.

A module that ``parallelize_module`` was called of holds its ``DeviceMesh`` in closures of its hooks, so it cannot be
given another one; but whatever its processes say to each other they say in the groups whose names the mesh has. Read in
PyTorch 2.11 to 2.15.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Fsdp
from memrewrite.torch_internals.groups import alone_among
from memrewrite.torch_internals.patches import process_wide

_NAMES = "_dim_group_names"
_NUMBERS = itertools.count()
Ranks = tuple[int, ...]
"""Which processes a group has."""


def device_mesh(device_type: str, group: Any) -> Any:
    """A mesh of the processes of ``group``; no other has its name.

    What is kept of a mesh is kept of all that are alike, and its group will be gone.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"tp {next(_NUMBERS)}",))


def device_meshes(mesh: Fsdp, device_type: str, group: Callable[[list[int]], Any]) -> tuple[Any, Any]:
    """The mesh for ``fully_shard``, and that which layers are divided over, None where they are not.

    ``group`` makes their groups, each asked for by all processes in the same order. No other has their names, as in
    ``device_mesh``.
    """
    from torch.distributed.device_mesh import DeviceMesh

    number = next(_NUMBERS)
    sizes = {f"{name} {number}": size for name, size in mesh.dimensions.items()}
    ranks, here = torch.arange(mesh.processes, device="cpu").reshape(*sizes.values()), dist.get_rank()
    own = []
    for dim, size in enumerate(sizes.values()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        own += [made for line in lines for made in [group(line)] if here in line]
    names = (*sizes,)
    if len(names) == 1:
        return DeviceMesh.from_group(own[0], device_type, mesh_dim_names=names), None
    devices = DeviceMesh.from_group(own, device_type, ranks, mesh_dim_names=names)
    return (devices[names[:-1]], devices[names[-1]]) if mesh.tp > 1 else (devices, None)


def lines_of(devices: tuple[Any, Any] | None) -> list[Ranks]:
    """The processes of each group of these meshes that this one is in."""
    groups = [group for mesh in devices or () for group in mesh.get_all_groups()]
    return [tuple(dist.get_process_group_ranks(group)) for group in groups]


@process_wide
@contextlib.contextmanager
def meshes_in(groups: Sequence[Any], known: Mapping[str, Ranks] | None = None) -> Iterator[None]:
    """Let what the processes of one of ``groups`` say to each other in any mesh be said in that one.

    ``known`` are the processes of the groups that meshes have, by name; by default of those that there are.
    """
    from torch.distributed.device_mesh import DeviceMesh

    of_ranks = {tuple(sorted(dist.get_process_group_ranks(group))): group.group_name for group in groups}
    known = _known() if known is None else known
    others = {name: of_ranks[ranks] for name, ranks in known.items() if ranks in of_ranks}
    own = {other: name for name, other in reversed(others.items()) if name != other}

    def read(mesh: Any) -> list[str]:
        if _NAMES not in vars(mesh):
            raise AttributeError(_NAMES)  # as of a mesh that this process is not in
        return [others.get(name, name) for name in vars(mesh)[_NAMES]]

    def write(mesh: Any, names: list[str]) -> None:
        vars(mesh)[_NAMES] = [own.get(name, name) for name in names]  # of a mesh that is made of others, which may stay

    with mock.patch.object(DeviceMesh, _NAMES, property(read, write), create=True):
        yield


def _known() -> dict[str, Ranks]:
    from torch.distributed import distributed_c10d as c10d

    internals: Any = c10d
    names: dict[Any, str] = internals._pg_names
    return {name: tuple(sorted(internals._pg_group_ranks[group])) for group, name in names.items()}


@process_wide
@contextlib.contextmanager
def speaking_to_nobody(size: int) -> Iterator[None]:
    """Let meshes of these ``size`` processes speak to none: what they would be sent is made of what this one has.

    Raises ``UsageError`` for what is sent in another group, where this process would wait for the others.
    """
    known, here = _known(), dist.get_rank() if dist.is_initialized() else 0
    with alone_among(size, here):
        parts = {ranks for ranks in known.values() if here in ranks and len(ranks) < size}
        with meshes_in([dist.group.WORLD, *map(dist.new_group, sorted(parts))], known), _no_other_groups():
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
