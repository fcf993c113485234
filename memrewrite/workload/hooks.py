"""A model without hooks that are not called while it is optimized: its own, which work on the result as before, and
those by which transformers records what layers give.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memrewrite.runtime.dropin import own
from memrewrite.runtime.recorders import INSTALLED, is_recorder, shared_with


def without_hooks(model: nn.Module) -> nn.Module:
    """The same model, sharing everything with ``model`` but the hooks registered on ``model`` itself."""
    kind = type(model)
    result: nn.Module = object.__new__(kind)  # past a __new__ of the class's own, which may call __init__
    vars(result).update({k: v for k, v in vars(model).items() if k != "_compiled_call_impl"})  # that one calls model
    vars(result).update({name: type(hooks)() for name, hooks in _call_hooks(model).items()})
    return result


@contextmanager
def hooks_off(module: nn.Module) -> Iterator[None]:
    """Let no hook registered on ``module`` itself be called; for a drop-in, of which there is no copy to call."""
    hooks = _call_hooks(module)
    vars(module).update({name: type(found)() for name, found in hooks.items()})
    try:
        yield
    finally:
        vars(module).update(hooks)


@contextmanager
def recorders_off(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model is as it was before it registered recorders (``memrewrite.runtime.recorders``)."""
    tables = [vars(module).get("_forward_hooks", {}) for module in model.modules()]
    recording = [(table, dict(table)) for table in tables if any(map(is_recorder, table.values()))]
    noted = [(vars(module), vars(module).pop(INSTALLED)) for module in model.modules() if INSTALLED in vars(module)]
    for table, hooks in recording:
        for key in [key for key, hook in hooks.items() if is_recorder(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in recording:
            table.clear()
            table.update(hooks)
        for attributes, installed in noted:
            attributes[INSTALLED] = installed


def with_hooks_of(model: nn.Module, result: nn.Module) -> None:
    """Share the hooks registered on ``model`` itself with ``result``, and what it notes of recorders.

    Their handles remove them from both.
    """
    vars(result).update(_call_hooks(model))
    if own(result) is not None:
        setattr(type(result), INSTALLED, shared_with(model))


def _call_hooks(model: nn.Module) -> dict[str, dict[int, Any]]:
    """The dictionaries that calls of the model look into, not those of state dictionaries."""
    return {k: v for k, v in vars(model).items() if k.startswith(("_forward_", "_backward_")) and isinstance(v, dict)}
