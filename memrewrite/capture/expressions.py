"""Values as Python expressions: constants, containers, and the structures of other classes by PyTorch's pytree."""

import dataclasses
import keyword
import sys
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import torch

from memrewrite.records.errors import CaptureError
from memrewrite.records.kernel_launch import Named
from memrewrite.torch_internals.pytrees import TreeSpec, treespec_dumps


def literal(value: Any) -> str:
    """A constant as an expression. Raises ``CaptureError`` for a type that has none."""
    if isinstance(value, torch.device):
        return f"torch.device({value.type!r})"  # the current device of that type, whichever rank runs it
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if value is None or isinstance(value, bool):
        return repr(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, complex):
        return f"complex({float.__repr__(value.real)}, {float.__repr__(value.imag)})"
    for plain in (int, float, str):  # not the repr of a subclass, such as an enum's or NumPy's
        if isinstance(value, plain):
            return plain.__repr__(value)
    raise unspelled(type(value).__name__)


def is_literal(value: Any) -> bool:
    """Whether ``literal`` has an expression for a constant."""
    try:
        literal(value)
    except CaptureError:
        return False
    return True


def unspelled(kind: str) -> CaptureError:
    """The error for a value of a class that no program can make."""
    way_out = (
        "where forward returns one with tensors in it, return those, or register it if it is a dataclass "
        "(torch.export.register_dataclass with a serialized_type_name)"
    )
    if kind.endswith("Cache"):  # as transformers calls all of them
        way_out = (
            "do without a cache of keys and values, of which training has no use (model.config.use_cache = False, or "
            "where models of several kinds are in one, model.config.get_text_config().use_cache = False)"
        )
    return CaptureError(f"The graph holds a value of type {kind}, which cannot be written as source; {way_out}.")


def attribute_of(owner: str, name: str) -> str:
    """An attribute of what the expression ``owner`` gives, as an expression."""
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{owner}.{name}" if plain else f"getattr({owner}, {name!r})"


class Trees:
    """Structures that no expression nests, as constants, because ``torch.compile`` cannot trace how they are made."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.texts: list[str] = []
        self.modules: dict[str, None] = {}  # those of the classes, which PyTorch knows once they are imported

    def name(self, tree: TreeSpec) -> str:
        """The name of a further constant."""
        self.texts.append(_dumped(tree))
        self.modules |= dict.fromkeys(kind.__module__ for kind in _classes(tree))
        return f"{self.prefix}TREE_{len(self.texts) - 1}"

    def lines(self) -> list[str]:
        """The statements that make all of them."""
        imports = [f"importlib.import_module({module!r})\n" for module in self.modules]
        return [*imports, *(f"{self.prefix}TREE_{i} = treespec_loads({text!r})\n" for i, text in enumerate(self.texts))]


def nested(tree: TreeSpec, leaves: list[str], trees: Trees) -> str:
    """An expression that nests the leaves the way ``tree`` says; ``trees`` takes up the constants it needs."""
    if tree.is_leaf():
        return leaves[0]
    parts = []
    rest = leaves
    for child in tree.children():
        parts.append(nested(child, rest[: child.num_leaves], trees))
        rest = rest[child.num_leaves :]
    if tree.type is tuple:
        return f"({''.join(part + ', ' for part in parts)})"
    if tree.type is list:
        return f"[{', '.join(parts)}]"
    if tree.type is dict:
        return f"{{{', '.join(f'{literal(k)}: {part}' for k, part in zip(tree.context, parts, strict=True))}}}"
    if tree.type is namedtuple:
        return f"{_class(tree.context)}({', '.join(parts)})"
    if tree.type.__module__ == "torch.return_types":
        return f"torch.return_types.{tree.type.__name__}(({''.join(part + ', ' for part in parts)}))"
    return f"tree_unflatten([{', '.join(leaves)}], {trees.name(tree)})"


def class_of(kind: type) -> str:
    """A class of the user's as an expression, "" where its module has it under no name of its own."""
    found = named(kind, kind.__module__, kind.__qualname__)
    return "" if found is None else expression(found)


def expression(value: Named) -> str:
    """What a module has as an expression."""
    return f"importlib.import_module({value.module!r}).{value.path}"


def named(value: Any, module: str, path: str) -> Named | None:
    """Where a value is found, None if it is not there."""
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return Named(module, path) if found is value else None


def _class(kind: type) -> str:
    if not (found := class_of(kind)):
        raise CaptureError(
            f"forward takes or returns a {kind.__name__}, which {kind.__module__} has under no name of its own; "
            "define the class at the top of a module."
        )
    return found


def _classes(tree: TreeSpec) -> Iterator[type]:
    """Those of all containers in it but Python's own."""
    if not tree.is_leaf() and tree.type.__module__ not in ("builtins", "collections"):
        yield tree.type
    for child in tree.children():
        yield from _classes(child)


def _dumped(tree: TreeSpec) -> str:
    """The structure of a class PyTorch knows how to flatten (a model output, say) as text."""
    try:
        return treespec_dumps(tree)
    except (NotImplementedError, TypeError, ValueError) as error:
        name = tree.type.__name__
        advice = "; register it with a serialized_type_name" * dataclasses.is_dataclass(tree.type)
        raise CaptureError(f"forward takes or returns a {name}, which cannot be written as source{advice}.") from error
