"""One name for one operation, whichever way a front end spells it.

The export front end gives ATen overloads (``aten.mul.Tensor``), Dynamo torch functions (``torch.mul``), operators
(``operator.mul``, ``operator.imul``) and methods (``call_method mul_``). Passes ask here and need not know.
"""

import inspect
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from memrewrite.torch_internals.operators import OpOverload, names_of, returns_view, taking_the_same

_SAME = {
    "divide": "div",
    "expit": "sigmoid",
    "multiply": "mul",
    "negative": "neg",
    "special_erf": "erf",
    "special_expit": "sigmoid",
    "subtract": "sub",
    "true_divide": "div",
    "truediv": "div",
}
CASTS = ("to", "float", "double", "half", "bfloat16", "_to_copy", "type")
_OPERANDS = ("self", "input", "other", "exponent")


@dataclass(frozen=True)
class Spelling:
    """What a node calls and with which arguments; ``put`` makes a node call it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        """What to call with the arguments; for a method its unbound function."""
        return getattr(Tensor, self.target) if isinstance(self.target, str) else self.target

    def put(self, node: fx.Node) -> None:
        """Make ``node`` this call; it keeps its name, place and meta."""
        node.target, node.args, node.kwargs = self.target, self.args, self.kwargs


def operation(node: Any) -> str:
    """The name of what a node computes (``mul``, ``sigmoid``, ``relu_``), "" for anything that is no operation."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    target = node.target
    if isinstance(target, OpOverload):
        namespace, packet, _ = names_of(target)
        name = packet if namespace == "aten" else ""
    elif isinstance(target, str):
        name = target.strip("_") + "_" * (target.endswith("_") and not target.startswith("__"))
    elif isinstance(target, types.BuiltinFunctionType) or _functional(target):
        name = target.__name__
    else:
        name = ""
    return _SAME.get(name, name)


def operands(node: fx.Node) -> tuple[Any, ...]:
    """The operands of an elementwise operation in order, or () when it has options beside them (``alpha=2``)."""
    if not set(node.kwargs) <= set(_OPERANDS):
        return ()
    return (*node.args, *(node.kwargs[name] for name in _OPERANDS if name in node.kwargs))


def options(node: fx.Node) -> tuple[Any, ...]:
    """Every argument but the first operand, positional ones first."""
    given = (*node.args, *(node.kwargs[name] for name in _OPERANDS if name in node.kwargs))
    return (*given[1:], *(value for name, value in node.kwargs.items() if name not in _OPERANDS))


def by_name(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """The arguments that are given, by the names that they have in order."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def operand(node: fx.Node) -> Any:
    """The first operand."""
    return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))


def number(value: Any) -> bool:
    """Whether ``value`` is a Python number that was written in the model."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def tensor(value: Any) -> Tensor | None:
    """The observed (fake) tensor of a node, None for anything else."""
    result = value.meta.get("val") if isinstance(value, fx.Node) else None
    return result if isinstance(result, Tensor) else None


def out_of_place(node: fx.Node) -> Spelling | None:
    """The same operation with its result in a new tensor; None where it does not write its operand or has no such form.

    Derived from the operator's own name and schema: ``aten.add_.Tensor`` becomes ``aten.add.Tensor``.
    """
    target = node.target
    if node.op == "call_function" and isinstance(target, OpOverload):
        _, packet, _ = names_of(target)
        return _respell(node, _aten(target, packet[:-1])) if packet.endswith("_") else None
    if node.op == "call_method" and isinstance(target, str):
        method = target[:-1] if target.endswith("_") and not target.endswith("__") else ""
        return _respell(node, method) if hasattr(Tensor, method) and not _is_view(method) else None
    if node.op != "call_function" or not callable(target):
        return None
    if _functional(target) and _flag(node) is True:
        return _with_flag(node, False)
    name = getattr(target, "__name__", "")
    if getattr(operator, f"__{name}__", None) is target and name.startswith("i"):
        return _respell(node, getattr(operator, name[1:], None) or getattr(operator, name[1:] + "_", None))
    if name.endswith("_") and getattr(torch, name, None) is target and not _is_view(name[:-1]):
        return _respell(node, getattr(torch, name[:-1], None))
    return None


def in_place(node: fx.Node) -> Spelling | None:
    """The same operation with its result written over its operand; None where there is no such form."""
    target = node.target
    if node.op == "call_function" and isinstance(target, OpOverload):
        return _respell(node, _aten(target, names_of(target)[1] + "_"))
    if node.op == "call_method" and isinstance(target, str):
        return _respell(node, target + "_") if hasattr(Tensor, target + "_") else None
    if _functional(target) and _flag(node) is not None:
        return _with_flag(node, True)
    return _respell(node, getattr(torch, getattr(target, "__name__", "") + "_", None))


def only_metadata(node: fx.Node) -> bool:
    """Whether an in-place operation changes how a tensor is seen but none of its bytes (``detach_``, ``squeeze_``)."""
    name = operation(node)
    return name.endswith("_") and _is_view(name[:-1])


def _respell(node: fx.Node, target: Any) -> Spelling | None:
    return Spelling(target, node.args, dict(node.kwargs)) if target else None


def _functional(target: Any) -> bool:
    return inspect.isfunction(target) and target.__module__ == "torch.nn.functional"


def _flag(node: fx.Node) -> Any:
    """The value of the ``inplace`` argument of a torch.nn.functional call, None where it takes none."""
    names = list(inspect.signature(node.target).parameters) if callable(node.target) else []
    if "inplace" not in names:
        return None
    position = names.index("inplace")
    return node.args[position] if position < len(node.args) else node.kwargs.get("inplace", False)


def _with_flag(node: fx.Node, flag: bool) -> Spelling:
    names = list(inspect.signature(node.target).parameters) if callable(node.target) else []
    position = names.index("inplace")
    kwargs = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    if position < len(node.args):
        return Spelling(node.target, (*node.args[:position], flag, *node.args[position + 1 :]), kwargs)
    return Spelling(node.target, node.args, {**kwargs, "inplace": True} if flag else kwargs)


def _aten(operator: OpOverload, packet: str) -> Any:
    """Its counterpart of that name when there is one that makes a new tensor or writes over its operand."""
    found = taking_the_same(operator, packet)
    return None if found is None or returns_view(found) else found


def _is_view(name: str) -> bool:
    """Whether a torch function or method of that name returns a view of its operand."""
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(returns_view(getattr(packet, overload)) for overload in packet.overloads())
