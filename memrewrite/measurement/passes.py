"""How many forward passes of a module wait for backward: what each of them keeps adds up."""

import weakref
from typing import Any

from torch import nn

from memrewrite.torch_internals.pytrees import tensors_in

_KEY = "memrewrite: a pass"


class _Pass:
    """Lives as long as the graph of one pass."""


class Waiting:
    """Counts the passes of ``module`` since ``begin`` whose graphs are there; ``remove`` takes its hook away.

    ``most`` is how many there were at once as one of them ended.
    """

    def __init__(self, module: nn.Module) -> None:
        self.most = 0
        self._passes = passes = list[weakref.ref[_Pass]]()
        mine = weakref.ref(self)

        # A function, not a method: a copy of the model that somebody makes copies its hooks, but not what these hold.
        def took(module: nn.Module, args: Any, output: Any) -> None:
            passes.append(_marked(output))
            if (waiting := mine()) is not None:
                waiting.most = max(waiting.most, len(waiting))

        self.remove = module.register_forward_hook(took).remove

    def begin(self) -> None:
        """Count anew: backward ran."""
        self._passes.clear()

    def __len__(self) -> int:
        return sum(each() is not None for each in self._passes)


def _marked(output: Any) -> weakref.ref[_Pass]:
    """What is there as long as the graph that made ``output``; of none, it is gone."""
    made = _Pass()
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
    for node in filter(None, nodes):
        node.metadata[_KEY] = made
    return weakref.ref(made)
