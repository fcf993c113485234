"""What ``fully_shard`` made of a model, read back: the mesh with its arguments, and the model as it was before.

The units keep their own records (``FSDPState`` and ``FSDPParamGroup``), for which there is no public reading; the class
of a unit is made on the fly between the user's and ``FSDPModule``. Read in PyTorch 2.11 to 2.15, which has lists of
groups since 2.13.
"""

import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Fsdp
from memrewrite.torch_internals.fsdp import DTYPES
from memrewrite.torch_internals.module_trees import copied
from memrewrite.torch_internals.spread import Spread, computed_on, is_spread

_FSDP = "torch.distributed.fsdp"
_BUFFERS = "reduce_scatter_max_input_buffers"  # which PyTorch has since 2.13
_SETTINGS = {"reshard_after_backward": True, "unshard_in_backward": True, _BUFFERS: 1}
_COMPOSED = "__composable_api_"  # what the names of records in a module's own dictionary begin with


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called of this module; what it comes from is imported for no other."""
    kind = getattr(sys.modules.get(_FSDP), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _units_in(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that ``fully_shard`` was called of."""
    return [module for module in model.modules() if is_sharded(module)]


@dataclass(frozen=True)
class _Unit:
    """One unit as its records say: a mesh of it alone, and what it gathers ahead in forward or backward.

    ``auto`` says that PyTorch chose how it reshards.
    """

    mesh: Fsdp
    auto: bool = True
    ahead: tuple[tuple[str, tuple[nn.Module, ...]], ...] = ()


def mesh_of(model: nn.Module) -> Fsdp:
    """The mesh that a sharded model is in; raises ``UsageError`` for what no mesh can say."""
    whole = tuple(name for name, parameter in model.named_parameters() if not is_spread(type(parameter)))
    names = {id(module): path for path, module in model.named_modules()}
    units = {path: module for path, module in model.named_modules() if is_sharded(module)}
    sizes = _dimensions(units)
    found = {path: _unit(path, units[path], sizes) for path in reversed(units)}  # inner ones first, as it was done
    root = found[""]
    meshes = {path: group.mesh_info.mesh for path, unit in units.items() for group in _groups_of(unit)}
    same = next(iter(meshes.values()))
    for path, unit in found.items():
        here, there = (replace(each.mesh, reshard=True) for each in (unit, root))
        if here != there or meshes.get(path, same) != same:
            raise UsageError(
                f"{path} has another mesh, mp_policy or offload_policy than the model itself; give all the same."
            )
    reshards = {path: unit.mesh.reshard for path, unit in found.items() if path}
    usual = _usual({id(units[path]._get_fsdp_state()): reshard for path, reshard in reshards.items()}.values())
    return replace(
        root.mesh,
        reshard=usual,
        reshard_root=not root.auto and root.mesh.reshard is not False,
        ignored=whole,
        paths=tuple(reshards),
        groups=_groups(units, names),
        reshards=tuple((path, reshard) for path, reshard in reshards.items() if reshard != usual),
        prefetched=tuple(
            (path, when, tuple(names[id(module)] for module in modules))
            for path, unit in found.items()
            for when, modules in unit.ahead
        ),
    )


def _dimensions(units: dict[str, Any]) -> Fsdp:
    """How many processes there are along each dimension, and the device meshes where layers are divided, too."""
    records = [(path, record) for path, unit in units.items() for record in _records(unit)]
    first = next(group for unit in units.values() for group in _groups_of(unit))
    sharding = first.mesh_info
    replicas = getattr(sharding, "replicate_mesh_size", 1)
    found = Fsdp(sharding.shard_mesh_size, replicas=replicas, offload=_is_offloaded(first))
    meshes = {spread.mesh: path for path, record in records if (spread := _before(record)) is not None}
    if not meshes:
        return found
    devices, *others = meshes
    if others or devices.ndim > 1 or getattr(sharding, "is_spmd_mesh", False):
        where = " and ".join(path or "the model itself" for path in dict.fromkeys(meshes.values()))
        raise UsageError(
            f"Parameters of {where} were spread over more than one mesh, or one of more dimensions, before "
            "fully_shard; one dimension for parallelize_module beside those for fully_shard is supported."
        )
    return replace(found, tp=devices.size(), devices=(sharding.mesh, devices))


def _usual(reshards: Iterable[bool | int]) -> bool | int:
    """What most units do with their parameters after forward; of as many, those that free them."""
    counted = Counter(reshards)
    return max(counted, key=lambda reshard: (counted[reshard], reshard is not False), default=True)


def _groups(units: dict[str, Any], names: dict[int, str]) -> tuple[tuple[str, ...], ...]:
    """The paths of units that ``fully_shard`` was called of at once, in its order."""
    states = {id(module._get_fsdp_state()): module._get_fsdp_state() for module in units.values()}
    found = [tuple(names[id(member)] for member in s._modules) for s in states.values() if len(s._modules) > 1]
    for group in found:
        if len({_around(path, units) for path in group}) > 1:
            raise UsageError(
                f"{' and '.join(group)} are sharded as one and lie in different units; shard them one by one."
            )
    return tuple(found)


def _around(path: str, units: dict[str, Any]) -> str:
    """The path of the unit that a unit lies in."""
    return max((unit for unit in units if not unit or path.startswith(f"{unit}.")), key=len, default="")


def _groups_of(module: Any) -> list[Any]:
    """The records of a unit's parameters, by mesh; none of one that has no parameters beside those of its units."""
    state = module._get_fsdp_state()
    return list(filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]))


def _records(module: Any) -> Iterator[Any]:
    """The record of each parameter of a unit."""
    return (record for group in _groups_of(module) for record in group.fsdp_params)


def shards_of_gathered(model: nn.Module) -> dict[int, Tensor]:
    """What ``fully_shard`` keeps, and an optimizer has, of each parameter that was gathered, by the ``id`` of that."""
    records = (record for unit in _units_in(model) for record in _records(unit))
    gathered = (record for record in records if hasattr(record, "_unsharded_param"))
    return {id(record._unsharded_param): record.sharded_param for record in gathered}


def in_transit(model: nn.Module) -> tuple[int, int]:
    """The bytes that are gathered besides what the unit that computes has, and those of gradients that are reduced
    meanwhile, none where nobody has another part: of the largest unit as a whole, and of those that are yet to be
    gathered and stay so.

    The outermost unit is gathered before all others and reduced after them. It counts where it is alone, as a buffer
    that is gathered into lives until the next one is, or all have run forward.
    """
    found: list[Any] = _units_in(model)
    units = [(unit._get_fsdp_state()._is_root, group) for unit in found for group in _groups_of(unit)]
    shared = [(outer, group) for outer, group in units if group.mesh_info.shard_mesh_size > 1]
    inner = [group for outer, group in shared if not outer]
    gathered = [*map(_gathered, inner or [group for _, group in shared])]
    reduced = map(_reduced, inner)
    waits = (not group.is_unsharded and group.post_forward_mesh_info is None for group in inner)
    stays = sum(size for size, kept in zip(gathered, waits, strict=False) if kept)
    return stays + max(gathered, default=0), max(reduced, default=0)


def _gathered(group: Any) -> int:
    """The bytes of a unit's parameters as they are gathered."""
    return sum(_bytes(each, each.param_dtype) for each in group.fsdp_params)


def _reduced(group: Any) -> int:
    """The bytes of the buffers that a unit's gradients are reduced from."""
    buffers: int = getattr(group, _BUFFERS, 1)
    return buffers * sum(_bytes(each, each.reduce_dtype, each.param_dtype) for each in group.fsdp_params)


def _bytes(record: Any, *kinds: torch.dtype | None) -> int:
    """Those of a whole parameter in the first of these types that is told, else in its own."""
    kind: torch.dtype = next(filter(None, kinds), record.orig_dtype)
    size: int = record._orig_size.numel() * kind.itemsize
    return size


def _before(record: Any) -> Spread | None:
    """How a parameter was spread when it was sharded, None where it was not."""
    spec = getattr(record, "_unsharded_dtensor_spec", None) or getattr(record, "_tp_spec", None)
    return None if spec is None else Spread(spec.mesh, spec.placements, spec.shape, spec.stride)


def _unit(path: str, module: Any, whole: Fsdp) -> _Unit:
    state, where, groups = module._get_fsdp_state(), path or type(module).__name__, _groups_of(module)
    if len(groups) > 1:
        raise UsageError(f"The parameters of {where} are sharded among different meshes; give all the same.")
    for name, usual in _SETTINGS.items():
        if any(getattr(group, name, usual) != usual for group in groups):
            raise UsageError(f"set_{name} was called of {where}, which no plan counts; leave it out.")
    waiting = {"forward": state._states_to_forward_prefetch, "backward": state._states_to_backward_prefetch}
    ahead = ((when, tuple(each._modules[0] for each in states)) for when, states in waiting.items() if states)
    mesh = _with_types(whole, state._mp_policy, where)
    if not groups:
        return _Unit(mesh, ahead=tuple(ahead))
    return _Unit(_of_group(groups[0], mesh), bool(state._auto_reshard_after_forward), tuple(ahead))


def _with_types(mesh: Fsdp, policy: Any, where: str) -> Fsdp:
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
    if any(dtype not in kinds for dtype in dtypes):
        raise UsageError(f"{where} is sharded with {policy}; of its types bf16, fp16 and fp32 are supported.")
    param, reduced, output = (kinds[dtype] for dtype in dtypes)
    cast = policy.param_dtype is None or policy.cast_forward_inputs
    return replace(mesh, param_dtype=param, reduce_dtype=reduced, output_dtype=output, cast_inputs=cast)


def _of_group(group: Any, mesh: Fsdp) -> Fsdp:
    """The mesh with what the group of a unit's parameters says of it."""
    own, after = group.mesh_info, group.post_forward_mesh_info
    reshard = after is not None and (True if after == own else after.shard_mesh_size)
    replicas = getattr(own, "replicate_mesh_size", 1)
    return replace(mesh, size=own.shard_mesh_size, replicas=replicas, reshard=reshard, offload=_is_offloaded(group))


def _is_offloaded(group: Any) -> bool:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(group.offload_policy, CPUOffloadPolicy)


def unsharded(model: nn.Module, empty: bool) -> nn.Module:
    """A copy of a sharded model as it was before, with parameters of its own; it shares buffers and all else.

    The parameters are random, or with ``empty`` take no memory. The random state stays as it is, and what was tensor
    parallel does.
    """
    records = [record for unit in _units_in(model) for record in _records(unit)]
    spread = {id(record.sharded_param): _before(record) for record in records}
    return copied(model, lambda given: _whole(given, empty, spread.get(id(given))), _before_sharding)[id(model)]


def _before_sharding(module: Any) -> tuple[type, dict[str, Any]]:
    """The class and the attributes that a module had."""
    state = {k: v for k, v in vars(module).items() if not k.startswith(_COMPOSED) and not _gathers_around(v)}
    if not is_sharded(module):
        return type(module), state
    fsdp = module._get_fsdp_state()
    own = {key for name, table in state.items() if name.endswith("_hooks") for key in _keys_of(table, fsdp)}
    hooks = {
        name: type(table)((k, v) for k, v in table.items() if k not in own)
        for name, table in state.items()
        if name.startswith(("_forward_", "_backward_", "_state_dict", "_load_state")) and isinstance(table, dict)
    }
    return _user_class(type(module)), state | hooks


def _whole(parameter: Tensor, empty: bool, spread: Spread | None) -> Tensor:
    shape, place = parameter.shape if spread is None else spread.here, computed_on(parameter)
    if empty:
        made = torch.zeros((), dtype=parameter.dtype, device=place).expand(shape)
    else:
        generator = torch.Generator(place).manual_seed(0)
        made = torch.empty(shape, dtype=parameter.dtype, device=place).normal_(0, 0.02, generator=generator)
    return made if spread is None else spread.of(made)


def _keys_of(table: Any, fsdp: Any) -> list[int]:
    """The hooks that are the unit's own; those of a group wrap its methods."""

    def of_unit(hook: Any) -> bool:
        return getattr(hook, "__self__", None) is fsdp

    return [key for key, hook in table.items() if of_unit(inspect.unwrap(hook, stop=of_unit))]


def _gathers_around(value: Any) -> bool:
    """Whether this is what ``register_fsdp_forward_method`` put in place of a method, which is of one module alone."""
    return isinstance(value, types.MethodType) and value.__func__.__globals__.get("__name__", "").startswith(_FSDP)


def _user_class(kind: type) -> type:
    """The class that ``fully_shard`` found."""
    from torch.distributed.fsdp import FSDPModule

    return kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
