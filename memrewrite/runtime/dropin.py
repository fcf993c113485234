"""The drop-in module: a subclass made on the fly whose forward is generated code. Torch only; part of every artifact.

``fully_shard`` and ``torch.nn.utils.parametrize`` swap classes the same way: the object stays an instance of the
user's class, with its attributes, methods, hooks and state-dict keys.
"""

import functools
import hashlib
import inspect
import itertools
import linecache
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten, treespec_loads

from memrewrite.runtime.batch_norm import normalize, rectify
from memrewrite.runtime.compiled import draw, in_turn, settled
from memrewrite.runtime.cross_entropy import chunked_cross_entropy
from memrewrite.runtime.segment import OWNERS, as_autocast, keep, once, run_segment
from memrewrite.runtime.swish import exact_swish, swish

_PARTS = "_memrewrite_parts"  # kept per object, with OWNERS, because they are looked at in every call
_SETTINGS = "_memrewrite_settings"  # kept per object and in its copies: numbers and switches as they were at capture
_WARNED = "_memrewrite_warned"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PROGRAMS: dict[str, "Program"] = {}


class FallbackWarning(UserWarning):
    """An optimized module met inputs it was not captured for and ran the original forward."""


@dataclass
class Program:
    """The generated code of one model and the calls it is right for.

    ``names`` are the parameters of forward the example call filled; ``tree`` is the structure of their values;
    ``leaves`` has one entry per leaf: ``(dtype, device type, sizes)`` of a tensor, sizes being ints or, where they may
    vary, names, or ``("constant", value)``. ``training`` maps submodule paths to the training flag they were captured
    with, ``dtype`` is that of the first parameter; ``autocast`` is the type it has to cast to, None where there may be
    none, "any" where that does not matter. ``fits`` says of named sizes whether forward takes the path that was
    captured. ``run`` computes ``forward`` from the module and the tensor leaves.
    ``source`` is the text all this came from.
    """

    names: tuple[str, ...]
    tree: TreeSpec
    leaves: tuple[Any, ...]
    training: dict[str, bool]
    dtype: torch.dtype | None
    run: Callable[..., Any]
    fits: Callable[..., bool] = lambda **sizes: True
    autocast: torch.dtype | Literal["any"] | None = "any"
    source: str = ""


def program_from(source: str) -> Program:
    """Compile generated source text; the text shows in tracebacks and to the debugger."""
    if source not in _PROGRAMS:
        file = f"<memrewrite {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        runtime = (
            *(Program, draw, in_turn, keep, normalize, once, rectify, run_segment, settled, swish, exact_swish),
            *(as_autocast, chunked_cross_entropy, tree_structure, tree_unflatten, treespec_loads),
        )
        namespace: dict[str, Any] = {getattr(item, "__name__", ""): item for item in runtime}
        exec(compile(source, file, "exec"), namespace)  # noqa: S102  (our own generated text)
        _PROGRAMS[source] = namespace["PROGRAM"]
        _PROGRAMS[source].source = source
    return _PROGRAMS[source]


@dataclass
class _Parts:
    """What every call looks at: the submodules, their settings, and the dictionaries of their hooks and parameters.

    ``children`` holds for each its path, the parent's ``_modules``, its name there, itself and the training flag it was
    captured with; ``hooked`` has the path that each of ``hooks`` belongs to; ``settings`` has a path, the module's
    attributes, one of their names and the value the generated code holds.
    """

    children: list[tuple[str, dict[str, Any], str, nn.Module, bool]]
    hooks: list[dict[int, Any]]
    hooked: list[str]
    owners: list[dict[str, Any]]
    settings: list[tuple[str, dict[str, Any], str, Any]]


def build(model: nn.Module, program: Program, constants: dict[str, Tensor]) -> nn.Module:
    """A module that runs ``program`` and shares every Parameter, buffer and submodule with ``model``."""
    state = {key: value for key, value in vars(model).items() if key != "_compiled_call_impl"}  # that one calls model
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        state[name] = vars(model)[name].copy()
    result = _empty(type(model), program)
    vars(result).update(state)
    for name, tensor in constants.items():
        result.register_buffer(name, tensor, persistent=False)
    _prepare(result, program)
    return result


def graft(model: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """A model that shares everything with ``model`` but has ``children`` at their paths ("" for the model itself)."""
    if "" in children:
        return children[""]
    kind = type(model)
    result = kind.__new__(kind)
    vars(result).update(vars(model))
    vars(result)["_modules"] = vars(model)["_modules"].copy()
    for name in dict.fromkeys(path.partition(".")[0] for path in children):
        inner = {path.partition(".")[2]: child for path, child in children.items() if path.partition(".")[0] == name}
        result._modules[name] = graft(model.get_submodule(name), inner)
    return result


def programs(model: nn.Module) -> dict[str, Program]:
    """The programs a rewritten model runs, by the path of the submodule ("" for the model itself)."""
    kinds = {path: vars(type(module)) for path, module in model.named_modules()}
    return {path: kind["_memrewrite"] for path, kind in kinds.items() if "_memrewrite" in kind}


def _load(base: type[nn.Module], source: str) -> nn.Module:
    """What pickle and deepcopy call: the optimisation travels as text, the class by reference, the state follows."""
    return _empty(base, program_from(source))


def _empty(base: type[nn.Module], program: Program) -> nn.Module:
    cls = _subclass(base, program)
    return cls.__new__(cls)


def _prepare(module: nn.Module, program: Program) -> None:
    """Note what every call looks at."""
    modules = dict(module.named_modules())
    children = []
    for path, flag in program.training.items():
        if path in modules and path:
            parent, _, name = path.rpartition(".")
            children.append((path, vars(modules[parent])["_modules"], name, modules[path], flag))
    hooked = [path for path, *_ in children for _ in _HOOKS]
    hooks = [vars(modules[path]).get(kind, {}) for path, *_ in children for kind in _HOOKS]
    owners = [vars(child)["_parameters"] for child in modules.values()]
    known = vars(module).setdefault(_SETTINGS, {path: _settings(child) for path, child in modules.items()})
    settings = [
        (f"{path}.{name}".lstrip("."), modules[path].__dict__, name, value)
        for path, values in known.items()
        if path in modules
        for name, value in values.items()
    ]
    vars(module)[_PARTS] = _Parts(children, hooks, hooked, owners, settings)
    vars(module)[OWNERS] = {
        f"{path}.{name}".lstrip("."): (owner, name)
        for path, child in module.named_modules(remove_duplicate=False)
        for owner in [vars(child)["_parameters"]]
        for name in owner
    }


def _settings(module: nn.Module) -> dict[str, bool | float]:
    """Attributes such as a rate of dropout. Other types are left out: forward itself may set sizes and labels."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | float)}
    return {name: value for name, value in plain.items() if name not in _OWN and not name.startswith("_memrewrite")}


_OWN = frozenset(vars(nn.Module()))


def _subclass(base: type[nn.Module], program: Program) -> type[nn.Module]:
    """``class Optimized<Base>(Base)`` with the program's forward; every other method is inherited.

    Only its ``__qualname__`` says Optimized: libraries look classes up by ``__name__`` and write it into files, such as
    transformers, which shifts smoothed labels only for the names of its causal language models.
    """

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors, reason = accept(program, self, args, kwargs)
        if tensors is not None and (program.training[""] or not _trains(self, tensors)):
            return program.run(self, *tensors)
        reason = reason if tensors is None else "it was captured in eval mode, for calls under torch.no_grad()"
        if reason and not self.__dict__.get(_WARNED):
            self.__dict__[_WARNED] = True
            text = f"Optimized {base.__name__} ran its original forward: {reason}."
            warnings.warn(text, FallbackWarning, stacklevel=2)
        return base.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any = None) -> Any:
        state: Any = self.__getstate__()
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key not in (_PARTS, OWNERS)}
        return _load, (base, program.source), state

    def restore(self: Any, state: Any) -> None:
        base.__setstate__(self, state)
        _prepare(self, program)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    members = {"forward": forward, "__reduce_ex__": reduce, "__setstate__": restore, "_memrewrite": program}
    names = {"__module__": base.__module__, "__qualname__": f"Optimized{base.__name__}"}
    return type(base.__name__, (base,), {**members, **names})


def accept(
    program: Program, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor] | None, str]:
    """The tensor leaves of a call the program is right for; else None and why (no reason: an ordinary mode switch)."""
    if module.training != program.training[""]:
        return None, ""
    if reason := _changed(module):
        return None, reason
    values: Any = _values(program.names, args, kwargs) if program.names else (args, kwargs)
    if values is None:
        return None, f"it was captured for a call with {', '.join(program.names)}"
    leaves, tree = tree_flatten(values)
    if tree != program.tree:
        return None, "the inputs are nested differently than at capture"
    return _match(program, module, leaves)


def _trains(module: nn.Module, tensors: list[Tensor]) -> bool:
    """Whether this call records anything for backward."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in itertools.chain(tensors, module.parameters()))


def _changed(module: nn.Module) -> str:
    """What is no longer as it was at capture: submodules, their modes and hooks, whose parameters; empty if nothing."""
    parts = vars(module).get(_PARTS)
    if parts is None:
        return "this object was not made by memrewrite.optimize but by a method of its class"
    eager = not torch.compiler.is_compiling()  # where compiled, the rest would only become guards
    for path, siblings, name, child, flag in parts.children:
        if child.training != flag:
            return f"{path} was captured in {'train' if flag else 'eval'} mode"
        if eager and siblings.get(name) is not child:
            return f"{path} is another module than at capture"
    if eager:
        if any(parts.hooks):
            path = next(path for path, hooks in zip(parts.hooked, parts.hooks, strict=True) if hooks)
            return f"{path} has a hook, which the rewritten forward would not call"
        for owner in parts.owners:
            for parameter in owner.values():
                if not (type(parameter) is Parameter or parameter is None or isinstance(parameter, Parameter)):
                    # recomputation in backward would find the module's own again
                    return "its parameters are replaced for this call (torch.func.functional_call)"
        for path, attributes, name, value in parts.settings:
            now = attributes.get(name)
            if now is not value and now != value:
                return f"{path} is {now!r}, captured as {value!r}"
    return ""


def _values(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The values of the named parameters in order, None when the call fills others."""
    if len(args) + len(kwargs) != len(names) or any(name not in kwargs for name in names[len(args) :]):
        return None
    return (*args, *(kwargs[name] for name in names[len(args) :]))


def _match(program: Program, module: nn.Module, leaves: list[Any]) -> tuple[list[Tensor] | None, str]:
    tensors: list[Tensor] = []
    sizes: dict[str, int] = {}
    for leaf, spec in zip(leaves, program.leaves, strict=True):
        if spec[0] == "constant":
            if type(leaf) is not type(spec[1]) or leaf != spec[1]:
                return None, f"an argument is {leaf!r}, captured as {spec[1]!r}"
            continue
        dtype, device, shape = spec
        if not isinstance(leaf, Tensor) or (leaf.device.type, leaf.dim()) != (device, len(shape)):
            return None, f"an input is {_describe(leaf)}, captured as {dtype} {tuple(shape)} on {device}"
        if leaf.dtype != dtype and not _cast_anyway(leaf, dtype):
            return None, f"an input is {_describe(leaf)}, captured as {dtype} {tuple(shape)} on {device}"
        for size, expected in zip(leaf.shape, shape, strict=True):
            if isinstance(expected, str):
                if size < 2 or sizes.setdefault(expected, size) != size:
                    return None, f"an input is {_describe(leaf)}, captured as {tuple(shape)}"
            elif size != expected:
                return None, f"an input is {_describe(leaf)}, captured as {tuple(shape)}"
        tensors.append(leaf)
    if not program.fits(**sizes):
        return None, f"for inputs of these sizes ({sizes}) forward takes another path than at capture"
    weight = next(module.parameters(), None)
    if weight is not None and weight.dtype != program.dtype:
        return None, f"the parameters are {weight.dtype}, captured as {program.dtype}"
    if program.autocast != "any":
        now = autocast_dtype(next((t.device.type for t in (weight, *tensors) if t is not None), "cpu"))
        if now != program.autocast:
            return None, f"it asks about autocast, which casts to {now} now and to {program.autocast} at capture"
    return tensors, ""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to there; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _cast_anyway(leaf: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast makes of this input what it makes of one of ``dtype`` (values between regions are its own)."""
    return leaf.is_floating_point() and dtype.is_floating_point and torch.is_autocast_enabled(leaf.device.type)


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device.type}"
    return f"a {type(leaf).__name__}"
