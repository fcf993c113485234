"""Which submodules assumed what about sizes that vary, while they were traced.

A loop over a text settles on its length, a branch assumes a condition. Hooks on each submodule look before and after.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from memrewrite.torch_internals.tracing import assumed_so_far, conditions_in_order, settled_on, varying_size


class Assumptions:
    """What was assumed in each submodule by path, but not in those inside of it."""

    def __init__(self) -> None:
        self._size: torch.SymInt | None = None  # any, of which tracing can be asked
        self._settled: dict[int, set[str]] = {}
        self._conditions: dict[int, set[str]] = {}  # by their number
        self._running: list[tuple[set[int], int]] = []  # what was known before each

    def settled(self, number: int) -> set[str]:
        """The submodules that settled on a number."""
        return self._settled.get(number, set())

    def asked(self, condition: str) -> set[str]:
        """The first submodule that assumed a condition, a text of ``size_conditions``; none where it was in no one."""
        texts = [] if self._size is None else conditions_in_order(self._size)
        return self._conditions.get(texts.index(condition), set()) if condition in texts else set()

    def _begin(self, given: Any) -> None:
        """A submodule is called."""
        found = varying_size(given)
        self._size = self._size if found is None else found
        self._running.append(self._known())

    def _end(self, path: str) -> None:
        """The submodule at ``path``, which was called last, has returned."""
        before, first = self._running.pop()
        settled, count = self._known()
        for number in settled - before:
            self._settled.setdefault(number, {path})  # those that it is in end later
        for condition in range(first, count):
            self._conditions.setdefault(condition, {path})

    def _known(self) -> tuple[set[int], int]:
        return (set(), 0) if self._size is None else (settled_on(self._size), assumed_so_far(self._size))

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Note what is assumed while ``model`` is traced."""
        with ExitStack() as stack:
            for path, module in model.named_modules():

                def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
                    self._begin((args, kwargs))

                def end(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                    self._end(path)

                stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(end).remove)
            yield
