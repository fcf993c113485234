"""The drop-in module: a subclass made on the fly whose forward is generated code. Torch only; part of every artifact.

``fully_shard`` and ``torch.nn.utils.parametrize`` swap classes the same way: the object stays an instance of the
user's class, with its attributes, methods, hooks and state-dict keys.
"""

import functools
import hashlib
import inspect
import linecache
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten, treespec_loads

from memrewrite.runtime.segment import once, run_segment
from memrewrite.runtime.swish import exact_swish, swish

_FLAGS = "_memrewrite_flags"  # (submodule, path, training flag at capture), kept per object because checked per call
_WARNED = "_memrewrite_warned"
_PROGRAMS: dict[str, "Program"] = {}


class FallbackWarning(UserWarning):
    """An optimized module met inputs it was not captured for and ran the original forward."""


@dataclass
class Program:
    """The generated code of one model and the calls it is right for.

    ``names`` are the parameters of forward the example call filled; ``tree`` is the structure of their values;
    ``leaves`` has one entry per leaf: ``(dtype, device type, sizes)`` of a tensor, sizes being ints or, where they may
    vary, names, or ``("constant", value)``. ``training`` maps submodule paths to the training flag they were captured
    with, ``dtype`` is that of the first parameter. ``run`` computes ``forward`` from the module and the tensor leaves.
    ``source`` is the text all this came from.
    """

    names: tuple[str, ...]
    tree: TreeSpec
    leaves: tuple[Any, ...]
    training: dict[str, bool]
    dtype: torch.dtype | None
    run: Callable[..., Any]
    source: str = ""


def program_from(source: str) -> Program:
    """Compile generated source text; the text shows in tracebacks and to the debugger."""
    if source not in _PROGRAMS:
        file = f"<memrewrite {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        runtime = (Program, once, run_segment, swish, exact_swish, tree_structure, tree_unflatten, treespec_loads)
        namespace: dict[str, Any] = {getattr(item, "__name__", ""): item for item in runtime}
        exec(compile(source, file, "exec"), namespace)  # noqa: S102  (our own generated text)
        _PROGRAMS[source] = namespace["PROGRAM"]
        _PROGRAMS[source].source = source
    return _PROGRAMS[source]


def build(model: nn.Module, program: Program, constants: dict[str, Tensor]) -> nn.Module:
    """A module that runs ``program`` and shares every Parameter, buffer and submodule with ``model``."""
    state = {key: dict(value) if type(value) is dict else value for key, value in model.__dict__.items()}
    for name in ("_parameters", "_buffers", "_modules"):
        state[name] = model.__dict__[name].copy()
    result = _revive(type(model), program, state)
    for name, tensor in constants.items():
        result.register_buffer(name, tensor, persistent=False)
    return result


def _load(base: type[nn.Module], source: str, state: dict[str, Any]) -> nn.Module:
    """What pickle and deepcopy call: the optimisation travels as text, the class by reference."""
    return _revive(base, program_from(source), state)


def _revive(base: type[nn.Module], program: Program, state: dict[str, Any]) -> nn.Module:
    cls = _subclass(base, program)
    module: nn.Module = cls.__new__(cls)
    module.__dict__.update(state)
    children = dict(module.named_modules())
    module.__dict__[_FLAGS] = [(children[p], p, flag) for p, flag in program.training.items() if p in children]
    return module


def _subclass(base: type[nn.Module], program: Program) -> type[nn.Module]:
    """``class Optimized<Base>(Base)`` with the program's forward; every other method is inherited."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors, reason = accept(program, self, args, kwargs)
        if tensors is not None:
            return program.run(self, *tensors)
        if reason and not self.__dict__.get(_WARNED):
            self.__dict__[_WARNED] = True
            text = f"Optimized {base.__name__} ran its original forward: {reason}."
            warnings.warn(text, FallbackWarning, stacklevel=2)
        return base.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any = None) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != _FLAGS}
        return _load, (base, program.source, state)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": base.__module__, "_memrewrite": program}
    return type(f"Optimized{base.__name__}", (base,), members)


def accept(
    program: Program, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor] | None, str]:
    """The tensor leaves of a call the program is right for; else None and why (no reason: an ordinary mode switch)."""
    if module.training != program.training[""]:
        return None, ""
    for child, path, flag in module.__dict__[_FLAGS]:
        if child.training != flag:
            return None, f"{path} was captured in {'train' if flag else 'eval'} mode"
    values: Any = _values(program.names, args, kwargs) if program.names else (args, kwargs)
    if values is None:
        return None, f"it was captured for a call with {', '.join(program.names)}"
    leaves, tree = tree_flatten(values)
    if tree != program.tree:
        return None, "the inputs are nested differently than at capture"
    return _match(program, module, leaves)


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
        if not isinstance(leaf, Tensor) or (leaf.dtype, leaf.device.type, leaf.dim()) != (dtype, device, len(shape)):
            return None, f"an input is {_describe(leaf)}, captured as {dtype} {tuple(shape)} on {device}"
        for size, expected in zip(leaf.shape, shape, strict=True):
            if isinstance(expected, str):
                if size < 2 or sizes.setdefault(expected, size) != size:
                    return None, f"an input is {_describe(leaf)}, captured as {tuple(shape)}"
            elif size != expected:
                return None, f"an input is {_describe(leaf)}, captured as {tuple(shape)}"
        tensors.append(leaf)
    weight = next(module.parameters(), None)
    if weight is not None and weight.dtype != program.dtype:
        return None, f"the parameters are {weight.dtype}, captured as {program.dtype}"
    return tensors, ""


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device.type}"
    return f"a {type(leaf).__name__}"
