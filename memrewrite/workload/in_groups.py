"""An optimizer's step that takes some parameters at a time, and so makes that much less beside them.

By default PyTorch's optimizers on CUDA update all parameters of a group at once (``foreach``), with temporaries as
large as they are. In groups of fewer bytes, one after the other, the same kernels compute the same bits of each.
"""

import contextlib
import functools
import math
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.state.bits import same_bits
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.torch_internals.spread import computed_on
from memrewrite.workload.step import OptimizerFactory, Step, optimizers_like

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
MOST = 64 * 2**20
"""Bytes of the parameters in a group: what AdamW makes beside them is as much."""
TOLD = (
    "The optimizer's step is planned in groups of 64 MiB of parameters: let yours step so, by "
    "memrewrite.step_in_groups(optimizer)."
)
_TRIED = 8  # parameters that a step is tried with,
_LONGEST = 4  # of so many elements along each dimension,
_STEPS = 3


class InGroups:
    """What an optimizer's class has before its own where it steps in groups."""

    _of: type[torch.optim.Optimizer]
    _most: int
    param_groups: list[dict[str, Any]]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the class; meanwhile its groups of parameters are divided."""
        with _in_parts(self):
            return super().step(*args, **kwargs)  # type: ignore[misc]

    step.hooked = True  # type: ignore[attr-defined]  # by PyTorch, as the step of the class is

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (self._of, self._most, self.__getstate__())


def factory_like(optimizer: torch.optim.Optimizer) -> OptimizerFactory:
    """``optimizers_like``, also of one that steps in groups."""
    if not isinstance(optimizer, InGroups):
        return optimizers_like(optimizer)
    return making_groups(optimizers_like(optimizer, optimizer._of), optimizer._most)


def made_whole(factory: OptimizerFactory | None) -> tuple[OptimizerFactory | None, int | None]:
    """The factory of the same optimizers without groups, and the bytes of a group, None where it makes none."""
    if isinstance(factory, functools.partial) and factory.func is _made:
        return factory.args[0], factory.args[1]
    return factory, None


def step_in_groups(optimizer: O, most: int = MOST) -> O:
    """Let each step of ``optimizer`` take its parameters in groups of at most ``most`` bytes; returns the optimizer.

    Its state, its groups as everybody else sees them, and ``state_dict`` stay as they are. A parameter of more bytes is
    a group by itself. Raises ``UsageError`` where that step would not have the same bits: where what it does to one
    parameter depends on others, or it takes no groups.
    """
    if isinstance(optimizer, InGroups):
        return optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _check(optimizers_like(optimizer), parameters)
    return _in_groups(optimizer, most)


def making_groups(factory: OptimizerFactory, most: int = MOST) -> OptimizerFactory:
    """A factory of the same optimizers that step in groups; nothing is tried."""
    return functools.partial(_made, factory, most)


def stepping(step: Step, model: nn.Module, how: Literal["whole", "grouped"]) -> Step:
    """The same step of ``model``, with the optimizer's own in groups if asked for.

    Raises ``UsageError`` for another way, where there is no such step, and as ``step_in_groups`` does.
    """
    if how == "whole":
        return step
    if how != "grouped":
        raise UsageError(f"optimizer_step={how!r} is unknown; give 'whole' or 'grouped'.")
    if step.optimizer is None or step.mode == "inference":
        raise UsageError("optimizer_step='grouped' is for a training step with an optimizer; leave it out.")
    if isinstance(step.make_optimizer(model), InGroups):
        return step
    _check(step.optimizer, [p for p in model.parameters() if p.requires_grad])
    return replace(step, optimizer=making_groups(step.optimizer))


def _check(make: OptimizerFactory, parameters: list[nn.Parameter]) -> None:
    """Raise ``UsageError`` where steps in groups of one parameter, of small ones like these, have other bits."""
    some = parameters[:: max(len(parameters) // _TRIED, 1)][:_TRIED]
    found = []
    name = getattr(make, "__name__", "optimizer")
    try:
        for most in (None, 1):
            small = [_small(parameter) for parameter in some]
            optimizer = make(small) if most is None else _in_groups(make(small), most)
            name = type(optimizer).__name__
            for number in range(_STEPS):
                for parameter in small:
                    parameter.grad = (parameter.detach() - number).cos()
                optimizer.step()
            found.append([*small, *tensors_in([optimizer.state[parameter] for parameter in small])])
    except (RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f"{name} takes no step in groups ({error}); leave it as it is.") from error
    if not all(same_bits(*pair) for pair in zip(*found, strict=True)):
        raise UsageError(
            f"{name} computes other numbers in groups: what it does to one parameter depends on others; "
            "leave it as it is."
        )


def _small(parameter: Tensor) -> nn.Parameter:
    """The first elements of one like it, of numbers between -1 and 1."""
    shape = [min(size, _LONGEST) for size in parameter.shape]
    numbers = torch.linspace(-1, 1, math.prod(shape), device=computed_on(parameter)).reshape(shape)
    return nn.Parameter(numbers.to(parameter.dtype))


def _made(factory: OptimizerFactory, most: int, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return _in_groups(factory(parameters), most)


def _made_again(kind: type[torch.optim.Optimizer], most: int, state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return _in_groups(optimizer, most)


def _in_groups(optimizer: O, most: int) -> O:
    optimizer.__class__ = _class_of(cast(Any, type(optimizer)), most)
    if (own := vars(optimizer).get("step")) is not None:  # a scheduler's, which calls that of the class as it was

        @functools.wraps(own)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with _in_parts(optimizer):
                return own(*args, **kwargs)

        vars(optimizer)["step"] = types.MethodType(step, optimizer)
    return optimizer


@contextlib.contextmanager
def _in_parts(optimizer: Any) -> Iterator[None]:
    """Meanwhile its groups of parameters are divided."""
    whole = optimizer.param_groups
    optimizer.param_groups = [part for group in whole for part in _divided(group, optimizer._most)]
    try:
        yield
    finally:
        optimizer.param_groups = whole


@functools.cache
def _class_of(kind: Any, most: int) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_of": kind, "_most": most}
    return type(kind.__name__, (InGroups, kind), names)


def _divided(group: dict[str, Any], most: int) -> Iterator[dict[str, Any]]:
    """The group in parts; what a step writes into one of them is in the group then."""
    parts: list[list[Tensor]] = []
    room = 0
    for parameter in group["params"]:
        if not parts or parameter.nbytes > room:
            parts.append([])
            room = most
        parts[-1].append(parameter)
        room -= parameter.nbytes
    yield from (_Part(group, part) for part in parts)


class _Part(dict[str, Any]):
    """Some parameters of a group, with its settings."""

    def __init__(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        super().__init__(group, params=parameters)
        self._group = group

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "params":
            self._group[key] = value
