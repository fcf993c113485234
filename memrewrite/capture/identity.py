"""Inputs that are one tensor, as in ``model(ids, labels=ids)``: front ends take them for one in every call.

Where forward asks for that (``key is value``), a program is for calls with the same ones that are one and no others.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from memrewrite.simulate.fake.fakes import on_fakes
from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.pytrees import tree_map
from memrewrite.workload.step import Inputs


def apart(inputs: Inputs, model: nn.Module) -> Inputs:
    """The same inputs where no two are one object, nor one of the model's: others over the same memory instead."""
    seen = {id(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.detach().requires_grad_(leaf.requires_grad)

    return Inputs(*tree_map(alone, (inputs.args, inputs.kwargs)))


def together(inputs: Inputs) -> Inputs | None:
    """The same inputs where all that can be one object are, None where none can."""
    first: dict[Any, Tensor] = {}
    found = inputs.changed(lambda leaf: first.setdefault((leaf.dtype, leaf.device, leaf.shape), leaf))
    return None if all(map(operator.is_, found.tensors(), inputs.tensors())) else found


def asked(model: nn.Module, inputs: Inputs, known: Sequence[str] = ()) -> bool:
    """Whether forward asks if inputs are one object (``key is value``) and goes another way where they are not.

    ``known`` are the operators of a run on the inputs as they are, where one was looked at.
    """
    apart = _operators(model, inputs, True)
    return apart != list(known) and apart != _operators(model, inputs, False)


def _operators(model: nn.Module, inputs: Inputs, separate: bool) -> list[str]:
    with on_fakes(model, inputs) as (twin, fakes):
        given = (apart(fakes, twin) if separate else fakes).of_a_run()
        with OperatorsSeen() as seen:  # none that copying takes
            twin.forward(*given.args, **given.kwargs)
    return seen.names


class OperatorsSeen(Layer):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return self.below(func, types, args, kwargs or {})
