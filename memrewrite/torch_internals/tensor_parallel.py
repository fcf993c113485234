"""Tensor parallelism on fake tensors: the plan of a model applied, or what ``parallelize_module`` made of it read back.

All of ``torch.distributed.tensor.parallel`` that is called is public; that ``src_data_rank=None`` leaves views into
whole parameters is not written anywhere. Read in PyTorch 2.11 to 2.15.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from torch import nn

from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Tp
from memrewrite.torch_internals.spread import is_spread, local_part
from memrewrite.torch_internals.tensor_experts import sum_around, sum_gradients_of_last
from memrewrite.torch_internals.tensor_plans import (
    EXPERTS,
    HEADS,
    LATENT,
    Divided,
    plan_of,
    refuse_uneven_heads,
    rotary_width,
)


def parallelize(module: nn.Module, devices: Any, bare: Collection[nn.Module] = ()) -> nn.Module:
    """The module, divided in place among the processes of a device mesh of one dimension, as its plan says.

    What the plan does not name every process has all of, spread over the mesh as well; the own
    parameters of ``bare`` modules stay as they are, as these get no hooks for that. Raises ``UsageError`` where there
    is no plan, or one that does not go with the number of processes.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    refuse_uneven_heads(module, devices.size())
    uses, alone, divided = _uses(module), set(), defaultdict(list)
    for path, style in plan_of(module).items():
        if isinstance(style, Divided):
            owner, _, name = path.rpartition(".")
            _divide(module.get_submodule(owner), name, style.dim, devices)
            divided[module.get_submodule(owner)].append(name)
        elif style == HEADS:
            alone.add(module.get_submodule(path))
        elif style == EXPERTS:
            sum_around(module.get_submodule(path), devices.get_group())
        elif style == LATENT:
            sum_gradients_of_last(module.get_submodule(path), rotary_width(module), devices.get_group())
        elif not isinstance(style, str):
            parallelize_module(module.get_submodule(path), devices, style, src_data_rank=None)
    refuse_uneven(module, devices.size())
    for part, names in divided.items():
        _here(part, names, None)
    for part in module.modules():
        if part not in bare:
            _replicate(part, devices, partial=part in alone)
    _of_their_own(module)
    _tie(uses)
    return module


def applied(model: nn.Module) -> Tp | None:
    """The mesh of a model that was parallelized already, None where no parameter is spread."""
    spread = {name: each for name, each in model.named_parameters() if is_spread(type(each))}
    meshes: dict[Any, str] = {}
    for name, each in spread.items():
        devices: Any = each.device_mesh  # type: ignore[attr-defined]
        meshes.setdefault(devices, name)
        if devices.ndim > 1:
            raise UsageError(
                f"{name} is spread over a mesh of {devices.ndim} dimensions; give the model before fully_shard, with "
                'mesh="fsdp=64,tp=8" say.'
            )
    if len(meshes) > 1:
        raise UsageError(f"{' and '.join([*meshes.values()][:2])} are spread over different meshes; give one to all.")
    return Tp(next(iter(meshes)).size(), applied=True) if meshes else None


def _uses(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter is that is in more than one place."""
    found: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                found[id(parameter)].append((part, name))
    return [places for places in found.values() if len(places) > 1]


def _tie(uses: list[list[tuple[nn.Module, str]]]) -> None:
    """Let what was one parameter be one again."""
    for (first, key), *others in uses:
        one: Any = first._parameters[key]
        for part, name in others:
            other: Any = part._parameters[name]
            if other.placements != one.placements:
                raise UsageError(
                    f"{type(first).__name__} and {type(part).__name__} share a parameter, their {name}, which the "
                    "tensor-parallel plan divides in two ways; name both alike."
                )
            part._parameters[name] = one


def refuse_uneven(module: nn.Module, size: int) -> None:
    """Raise ``UsageError`` for a parameter of which processes have parts of different sizes."""
    for name, parameter in module.named_parameters():
        for placement in getattr(parameter, "placements", ()):
            if placement.is_shard() and parameter.shape[placement.dim] % size:
                sizes = "x".join(map(str, parameter.shape))
                raise UsageError(f"{name} of {sizes} cannot be divided among tp={size}; give another number.")


def _of_their_own(module: nn.Module) -> None:
    """Let parts of parameters have storages of their own, as those that were sent by another process have."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            local = None if parameter is None else local_part(parameter)
            if local is not None and local.untyped_storage().nbytes() > local.nbytes:
                whole: Any = parameter
                part._parameters[name] = nn.Parameter(whole.detach().clone(), requires_grad=whole.requires_grad)


def _divide(part: nn.Module, name: str, dim: int, devices: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole: Any = part._parameters[name]
    spread = distribute_tensor(whole.detach(), devices, [Shard(whole.dim() + dim)], src_data_rank=None)
    part._parameters[name] = nn.Parameter(spread, requires_grad=whole.requires_grad)


def _replicate(part: nn.Module, devices: Any, partial: bool) -> None:
    """Spread a module's own parameters, of which every process has all; forward takes them as they are here.

    With ``partial`` each process makes a part of their gradients' sums.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    own = [name for name, each in part._parameters.items() if each is not None and not is_spread(type(each))]
    for name in own:
        whole: Any = part._parameters[name]
        spread = DTensor.from_local(whole.detach(), devices, [Replicate()], run_check=False)
        made = part._parameters[name] = nn.Parameter(spread, requires_grad=whole.requires_grad)
        if partial and made.requires_grad:
            made.register_post_accumulate_grad_hook(_summed)
    if own:
        _here(part, own, [Partial()] if partial else None)


def _here(part: nn.Module, names: list[str], gradients: Any) -> None:
    """Let forward take the parameters of these names as ordinary ones, with ``gradients`` placed like that."""
    kept: dict[str, Any] = {}

    def enter(module: nn.Module, args: Any) -> None:
        for name in names:
            parameter: Any = module._parameters[name]
            kept[name] = parameter
            module._parameters[name] = parameter.to_local(grad_placements=gradients)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(kept)
        kept.clear()

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave, always_call=True)  # a recomputation ends by an exception


def _summed(parameter: Any) -> None:
    """Sum the parts of a gradient."""
    from torch.distributed.tensor import Replicate

    parameter.grad = parameter.grad.redistribute(placements=[Replicate()] * len(parameter.grad.placements))
