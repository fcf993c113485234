"""What forward read, as expressions in ``self``: what code that is traced compares to see whether it still holds.

    len(self.body._modules), self.stem.stride, type(self.stem.forward), hasattr(self, 'doubled'), id(self.activation)

``torch.compile`` guards the values that the code it traces looks at, as it guards what the model's own code reads. It
does not see what is asked of ``__dict__``. What leads to a part is compared before the part is looked at.
"""

import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

from torch import nn

from memrewrite.capture.expressions import attribute_of
from memrewrite.runtime.guards import TABLES, Holder
from memrewrite.runtime.plain_values import is_plain

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_LENGTHS = (dict.__len__, list.__len__, tuple.__len__)  # a class with one of its own is asked nothing
_NOWHERE = object()


def way(holder: Holder) -> tuple[Any, ...]:
    """The attributes and keys that lead to it, one after another."""
    path, *rest = (holder,) if isinstance(holder, str) else holder
    return (*filter(None, path.split(".")), *rest)


def looks(
    root: nn.Module, holder: Holder, owner: Any, names: Iterable[str], new: Collection[str] = ()
) -> tuple[str, ...]:
    """Expressions for what was read of ``owner``, to which ``holder`` leads; none where it does not, in one way.

    Those of the names that are ``new`` were not there when they were read.
    """
    text, value = "self", cast(Any, root)
    for part in way(holder):
        items = isinstance(value, dict | list | tuple)
        try:
            value = value[part] if items else getattr(value, part)
        except (AttributeError, LookupError, TypeError):
            return ()
        text = f"{text}[{part!r}]" if items else attribute_of(text, part)
    if value is not owner:
        return ()
    kind = () if text == "self" else (f"type({text})",)
    absent = (_absent(text, name) for name in sorted(new))
    found = (look for name in sorted({*names, "training"} - {*new}) for look in _of_attribute(text, owner, name))
    return (*kind, *absent, *found)


def looks_at_tied(names: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Expressions for whether several names are still those of one tensor."""
    for first, *others in names:
        here, *rest = (functools.reduce(attribute_of, name.split("."), "self") for name in (first, *others))
        yield from (f"({here} is {there})" for there in rest)


def _of_attribute(text: str, owner: Any, name: str) -> Iterator[str]:
    mine, is_module = vars(owner), isinstance(owner, nn.Module)
    place = attribute_of(text, name)
    if name == "_modules" and is_module:
        yield f"len({place})"
    elif name in mine:
        yield from _of_value(place, mine[name])
    elif is_module and not any(name in mine[table] for table in TABLES):
        found = inspect.getattr_static(type(owner), name, _NOWHERE)
        if found is _NOWHERE:
            yield _absent(text, name)
        elif isinstance(found, types.FunctionType) and (text, name) != ("self", "forward"):
            yield f"type({place})"
        elif is_plain(found):
            yield from _of_value(place, found)


def _absent(text: str, name: str) -> str:
    return f"hasattr({text}, {name!r})"


def _of_value(text: str, value: Any) -> Iterator[str]:
    """What is compared of a value: all that is plain, functions, and the identity of methods and modules.

    Functions are looked at as they are: Dynamo of 2.11 does not trace ``id`` of one of PyTorch's own.
    """
    if type(value) in (bool, int, float):
        yield f"(type({text}), {text})"  # which tells 1 from True and 1.0
    elif is_plain(value) or isinstance(value, _FUNCTIONS):
        yield text
    elif getattr(type(value), "__len__", None) in _LENGTHS:
        yield f"len({text})"
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if isinstance(key, str | int):
                yield from _of_value(f"{text}[{key!r}]", item)
    elif isinstance(value, types.MethodType | nn.Module):
        yield f"id({text})"
