"""What has changed about a module since its program was captured, in words. Torch only; part of every artifact."""

import itertools
import reprlib
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Parameter

ABSENT = ...  # a value that can be compared as bytes
Owners = dict[str, tuple[dict[str, Any], str]]
"""By the name of a tensor the dictionary that it lies in, and its name there."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SHORT = reprlib.Repr()
WITHIN_CACHED = "it is called within parametrize.cached(), where each parametrized weight is computed once for all"


def joined(path: str, name: Any) -> str:
    """The path of what has this name in a module."""
    return f"{path}.{name}" if path else str(name)


def another_hook(path: str, then: Any, now: Any) -> str:
    """Why a hook that is there now matters."""
    return f"{path} has a hook, which the rewritten forward would not call" if now else ""


def another_class(path: str, then: type, now: type) -> str:
    """That a module has changed its class."""
    return f"{path} is a {now.__name__}, captured as a {then.__name__}"


def another_dictionary(label: str, then: Any, now: Any) -> str:
    """That a table was replaced."""
    return f"{label} is another dictionary than at capture"


def another_forward(path: str, then: Any, now: Any) -> str:
    """That a module runs another forward."""
    return f"{path} has another forward than at capture"


def another_module(path: str, then: Any, now: Any) -> str:
    """That a child was replaced, added or taken away."""
    return f"{path} is another module than at capture"


def another_member(label: str, then: Any, now: Any) -> str:
    """That something on a class is another, "" if it is equal."""
    same = type(then) is type(now) and (then == now or alike(then, now))
    return "" if same else f"{label} is another than at capture"


def alike(one: Any, other: Any) -> bool:
    """Whether two functions are one that was compiled again, as ``torch.fx`` does where modes are switched."""
    if not isinstance(one, FunctionType) or not isinstance(other, FunctionType) or one.__closure__ or other.__closure__:
        return False
    mine, theirs = one.__globals__, other.__globals__
    same = one.__code__ == other.__code__ and one.__defaults__ == other.__defaults__ and mine.keys() == theirs.keys()
    return same and all(value is theirs[name] for name, value in mine.items())


def another_object(label: str, then: Any, now: Any) -> str:
    """That an object is another, "" if it is equal."""
    return "" if then == now else f"{label} is another object than at capture"


def another_value(label: str, then: Any, now: Any) -> str:
    """That a plain value is another, or gone."""
    return f"{label} is {'no longer there' if now is ABSENT else _SHORT.repr(now)}, captured as {_SHORT.repr(then)}"


def another_table(path: str, then: dict[str, Any], now: dict[str, Any]) -> str:
    """What of parameters or buffers is of another kind, "" if nothing is."""
    names = (name for name in {**then, **now} if then.get(name, ABSENT) is not now.get(name, ABSENT))
    reasons = (another_tensor(joined(path, n), then.get(n, ABSENT), now.get(n, ABSENT)) for n in names)
    return next(filter(None, reasons), "")


def another_tensor(label: str, then: Any, now: Any) -> str:
    """That a tensor is of another kind, or replaced for one call; "" where a program follows it."""
    if isinstance(then, Parameter) and isinstance(now, Tensor) and not isinstance(now, Parameter):
        # recomputation in backward would find the module's own again
        return "its parameters are replaced for this call (torch.func.functional_call)"
    before, after = kind_of(then), kind_of(now)
    return "" if before == after else f"{label} is {after}, captured as {before}"


def kind_of(value: Any) -> str:
    """What programs take for granted of a parameter or buffer, in words."""
    if not isinstance(value, Tensor):
        return "nothing" if value is None or value is ABSENT else f"a {type(value).__name__}"
    own = f"a {type(value).__name__} of " if has_parts(value) else ""
    return f"{own}{value.dtype} {tuple(value.shape)}"


def has_parts(tensor: Tensor) -> bool:
    """Whether it is of a class whose tensors have others inside and compute as they like, which no spread one does."""
    return hasattr(type(tensor), "__tensor_flatten__") and type(tensor).__name__ != "DTensor"


def gathered_table(table: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Parameters as they are once ``fully_shard`` has gathered them in a type."""
    floating = {n: p for n, p in table.items() if isinstance(p, Parameter) and p.is_floating_point()}
    return table | {n: Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), False) for n, p in floating.items()}


def described(leaf: Any) -> str:
    """What an input is."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {sizes_of(leaf)} on {leaf.device.type}"
    return f"a {type(leaf).__name__}"


def sizes_of(tensor: Tensor) -> str:
    """Its sizes; only how many where ``torch.compile`` traces the call, as they need not be numbers there."""
    return f"of {tensor.dim()} dimensions" if torch.compiler.is_compiling() else f"{tuple(tensor.shape)}"


def owners_of(module: nn.Module, tied: tuple[tuple[str, ...], ...]) -> Owners:
    """Which dictionary each parameter lies in, and under which name there, and so what else has a name in ``tied``."""
    inside = {path: vars(child) for path, child in module.named_modules(remove_duplicate=False)}
    tables = {path: attributes["_parameters"] for path, attributes in inside.items()}
    found: Owners = {joined(path, name): (table, name) for path, table in tables.items() for name in table}
    for label in {*itertools.chain.from_iterable(tied)} - found.keys():
        path, _, name = label.rpartition(".")
        if path in inside:
            buffers = inside[path]["_buffers"]
            found[label] = (buffers if name in buffers else inside[path]), name
    return found


def parted(owners: Owners, tied: tuple[tuple[str, ...], ...]) -> str:
    """Which names of one tensor are those of several by now, "" if none are."""
    for first, *others in tied:
        owner, key = owners.get(first, ({}, first))
        one = owner.get(key)
        for name in others:
            another, its = owners.get(name, ({}, name))
            if (other := another.get(its)) is not one:
                kind = "parameters" if isinstance(other if one is None else one, Parameter) else "tensors"
                return f"{first} and {name} are two {kind}, captured as one"
    return ""


def divided(owners: Owners, name: str) -> bool:
    """Whether a parameter is spread over a mesh, by the name of its type, which is imported for no other model."""
    owner, key = owners.get(name, ({}, name))
    return type(owner.get(key)).__name__ == "DTensor"


def surrounded() -> str:
    """What is around this call that no program can do, "" for nothing."""
    all_hooks = torch.nn.modules.module
    if all_hooks._has_any_global_hook():
        tables = (getattr(all_hooks, f"_global{kind}") for kind in HOOKS)
        if any(not _follows(hook) for table in tables for hook in table.values()):
            return "hooks for all modules are registered, which the rewritten forward would not call"
    return transformed()


# Asked while Dynamo traces, which then is within the transforms that it traces, and guards on those around.
vars(surrounded)["_dynamo_marked_constant"] = True


def _follows(hook: Any) -> bool:
    """Whether a hook only notes which module is called, as those of PyTorch's counters and of ours do."""
    return str(getattr(hook, "__module__", "")).startswith(("torch.", "memrewrite."))


def transformed() -> str:
    """The transform of PyTorch's that runs now, "" for none: none takes all that programs do in their backward."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it is called within a transform of torch.func, as grad and vmap are"
    return "it is called within forward-mode differentiation" if forward_ad._current_level >= 0 else ""


def exported() -> bool:
    """Whether ``torch.export`` or ``torch.jit.trace`` traces the call.

    To Dynamo of 2.11, ``torch.compiler.is_exporting()`` is always true.
    """
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
