"""FSDP2's ``fully_shard``, and tensor parallelism, on fake tensors, in a process group of any size without peers.

Read in PyTorch 2.11 to 2.15.
What is gathered and reduced is observed as the hooks of the units run; storages that they free and fill again are
resized past the dispatcher, which is why these are told of one by one.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.torch_internals.fake_tensors import in_place_of_modes
from memrewrite.torch_internals.groups import alone_among
from memrewrite.torch_internals.mesh_groups import speaking_to_nobody
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.spread_lists import alike_found_once

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


@contextlib.contextmanager
def without_peers(mesh: Fsdp | Tp, device_type: str) -> Iterator[Callable[[nn.Module], None]]:
    """Gives what shards a module among the processes of ``mesh``, of which this is the first and no other is there."""
    from torch.distributed.device_mesh import init_device_mesh

    if isinstance(mesh, Fsdp) and mesh.devices is not None:
        sharding, _ = mesh.devices
        with _nobody_there(mesh.processes), quietly():
            yield lambda module: _sharded_first(module, mesh, sharding)
        return
    sizes = {"tp": mesh.size} if isinstance(mesh, Tp) else mesh.dimensions
    # How results are spread is kept by meshes, which are alike where their names are, though their groups are others.
    names = {name: f"{name} of {'x'.join(map(str, sizes.values()))}" for name in sizes}
    with alone_among(mesh.processes), quietly():
        devices = init_device_mesh(device_type, (*sizes.values(),), mesh_dim_names=(*names.values(),))

        def shard(module: nn.Module) -> None:
            if "tp" in names:
                _parallelize(module, devices[names["tp"]])
            if isinstance(mesh, Fsdp):
                _sharded_first(module, mesh, devices[(*(name for key, name in names.items() if key != "tp"),)])

        yield shard


def _nobody_there(size: int) -> contextlib.AbstractContextManager[None]:
    """As ``speaking_to_nobody``, if there is anybody."""
    return contextlib.nullcontext() if dist.get_backend() == "fake" else speaking_to_nobody(size)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Let modules be sharded that nobody will know of later."""
    with classes_forgotten(), warnings.catch_warnings():
        # What ends in a tensor-parallel layer gives a view, which must not be written to in place; nothing here does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        yield


def _sharded_first(module: nn.Module, mesh: Fsdp, devices: Any) -> None:
    with _of_the_first():
        sharded(module, mesh, devices)


def _parallelize(module: nn.Module, devices: Any) -> None:
    from memrewrite.torch_internals.tensor_parallel import parallelize  # imported for no other mesh

    parallelize(module, devices)


def sharded(module: nn.Module, mesh: Fsdp, devices: Any) -> nn.Module:
    """The module, sharded by ``fully_shard`` as ``mesh`` says, in place, among the processes of a ``DeviceMesh``."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    param, reduced, output = (DTYPES[kind] for kind in (mesh.param_dtype, mesh.reduce_dtype, mesh.output_dtype))
    policy = MixedPrecisionPolicy(param, reduced, output, mesh.cast_inputs)
    given: dict[str, Any] = {"mesh": devices, "mp_policy": policy}
    if mesh.ignored:
        given["ignored_params"] = {*ignored(module, mesh)}
    if mesh.offload:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # which lets copies wait, and takes no more here
    root = True if mesh.reshard_root else None if mesh.reshard is not False else False
    for together, reshard in _in_turn(module, mesh):
        fully_shard(together, reshard_after_forward=reshard, **given)
    fully_shard(module, reshard_after_forward=root, **given)
    for path, when, ahead in mesh.prefetched:
        ahead_of: Any = module.get_submodule(path)
        getattr(ahead_of, f"set_modules_to_{when}_prefetch")([module.get_submodule(each) for each in ahead])
    return module


@contextlib.contextmanager
def classes_forgotten() -> Iterator[None]:
    """Let no module that is sharded meanwhile live on by its class.

    ``fully_shard`` keeps every class that it met, and a drop-in has one of its own, which keeps the drop-in.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard

    with mock.patch.dict(_fully_shard.cls_to_fsdp_cls):
        yield


@contextlib.contextmanager
def _of_the_first() -> Iterator[None]:
    """Let a module be sharded as the first of all processes has it, without a tensor for each of the others."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with mock.patch.object(_fsdp_param, "_chunk_with_empty", _first_chunk), _joined_once(), _parts_of_meshes():
        yield


@contextlib.contextmanager
def _parts_of_meshes() -> Iterator[None]:
    """Let the mesh of those that keep parameters among them after forward be made among fake tensors, of a real one."""
    from torch.distributed.fsdp._fully_shard import _fully_shard

    internals: Any = _fully_shard
    make = internals._get_post_forward_mesh_info

    def made(*args: Any) -> Any:
        with in_place_of_modes():
            return make(*args)

    with mock.patch.object(internals, "_get_post_forward_mesh_info", made):
        yield


@contextlib.contextmanager
def _joined_once() -> Iterator[None]:
    """Let the mesh of a unit and that of its tensor-parallel parts be joined once, not for each parameter.

    The numbers of its processes are read from a tensor, which is to be a real one among fake ones.
    """
    from torch.distributed.device_mesh import DeviceMesh

    join: Any = DeviceMesh._concatenate
    known: dict[tuple[int, ...], Any] = {}

    def joined(meshes: list[Any]) -> Any:
        key = tuple(map(id, meshes))  # of meshes that parameters and units keep
        if key not in known:
            with in_place_of_modes():
                known[key] = join(meshes)
        return known[key]

    with mock.patch.object(DeviceMesh, "_concatenate", staticmethod(joined)):
        yield


def _first_chunk(tensor: Tensor, chunks: int, dim: int) -> list[Tensor]:
    """The chunk of the first of so many processes, for any; one for each of a thousand would take a minute to make."""
    return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // chunks))] * chunks


def _in_turn(module: nn.Module, mesh: Fsdp) -> Iterator[tuple[Any, bool | int]]:
    """What ``fully_shard`` is called of in turn, a unit or a group of them, and how that is resharded.

    A group comes where the last of its members would, when all that lies inside of any is sharded.
    """
    if mesh.paths is None:
        yield from ((unit, mesh.reshard) for unit in units(module, mesh))
        return
    others = dict(mesh.reshards)
    groups = {path: group for group in mesh.groups for path in group}
    met: set[str] = set()
    for path in mesh.paths:
        met.add(path)
        group = groups.get(path, (path,))
        if met.issuperset(group):
            members = [module.get_submodule(member) for member in group]
            yield members if len(members) > 1 else members[0], others.get(path, mesh.reshard)


def units(module: nn.Module, mesh: Fsdp) -> list[nn.Module]:
    """The modules that are sharded before the model itself; raises ``UsageError`` where the pattern fits none.

    A ``*`` in the pattern is a part of a path without dots.
    """
    if mesh.paths is not None:
        return [module.get_submodule(path) for path in mesh.paths]
    if not mesh.units:
        return _blocks(module)
    found = [part for path, part in module.named_modules() if path and _fits(mesh.units, path)]
    if not found:
        raise UsageError(f"No module has a path like {mesh.units!r}, the units of the mesh.")
    return found


def ignored(module: nn.Module, mesh: Fsdp) -> list[nn.Parameter]:
    """The parameters that are not sharded; raises ``UsageError`` where one of the patterns fits none."""
    named = dict(module.named_parameters()) if mesh.ignored else {}
    for pattern in mesh.ignored:
        if not any(_fits(pattern, path) for path in named):
            raise UsageError(f"No parameter has a path like {pattern!r}, which the mesh says is ignored.")
    return [each for path, each in named.items() if any(_fits(pattern, path) for pattern in mesh.ignored)]


def _fits(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), path) is not None


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of two modules or more of one class, as the layers of a transformer are."""
    found = []
    for child in module.children():
        members = list(child.children())
        kinds = {(type(member).__module__, type(member).__name__) for member in members}  # a drop-in's are its own
        alike = len(kinds) == 1 and len(members) > 1
        found += members if isinstance(child, nn.ModuleList | nn.Sequential) and alike else _blocks(child)
    return found


class Observer(Protocol):
    """What counts storages."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take notice of a storage that was resized past the dispatcher."""

    def looking_away(self) -> contextlib.AbstractContextManager[None]:
        """Count nothing meanwhile."""


@process_wide
@contextlib.contextmanager
def seen_by(observer: Observer) -> Iterator[None]:
    """Let ``observer`` see what sharded modules do past the dispatcher, and not what they only think of.

    Units resize the storages of what they gather. And tensors that are spread find the shape of a result by the same
    operator on fake tensors of the whole size, which are none of the step's.
    """
    resize: Any = torch.UntypedStorage.resize_
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    shape: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        observer.resized(storage)
        return result

    def shaped(propagator: Any, *args: Any) -> Any:
        with observer.looking_away():
            return shape(propagator, *args)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", shaped),
        alike_found_once(),
    ):
        yield
