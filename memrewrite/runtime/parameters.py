"""Which parameters of a forward a call fills, and with what. Torch only; part of every artifact."""

import inspect
from collections.abc import Callable
from typing import Any


class Parameters:
    """Those of a ``forward`` that takes the module first: which go by their place, and which may be left out.

    A value that is the default of its parameter counts as left out: ``model(x, None)`` is ``model(x)``.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        rest = [*inspect.signature(forward).parameters.values()][1:]
        self.placed = tuple(p.name for p in rest if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        self.defaults = {p.name: p.default for p in rest if p.default is not p.empty}

    def values(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The values of the named parameters in order, None when the call fills others."""
        given = {**dict(zip(self.placed, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs):  # which forward itself refuses
            return None
        if len(given) > len(names):
            given = {name: value for name, value in given.items() if not self._left_out(name, value)}
        if len(given) != len(names) or any(name not in given for name in names):
            return None
        return tuple(given[name] for name in names)

    def _left_out(self, name: str, value: Any) -> bool:
        return name in self.defaults and self.defaults[name] is value
