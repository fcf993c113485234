"""An optimizer that takes some of its parameters at a time, by the step of its own class."""

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.state.bits import same_bits
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.torch_internals.spread import computed_on
from memrewrite.workload.optimizers import OptimizerFactory

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
_TRIED = 8  # parameters that a step is tried with,
_LONGEST = 4  # of so many elements along each dimension,
_STEPS = 3


class Narrowed:
    """What an optimizer's class ``_of`` has before its own; ``_size`` is of bytes, and says how many are taken."""

    _of: type[torch.optim.Optimizer]
    _size: int
    _attached = False
    param_groups: list[dict[str, Any]]

    def begin(self) -> None:
        """It was just made."""

    def attach(self) -> None:
        """Do what it does in backward passes of the user's, too."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the class; meanwhile its groups of parameters are others."""
        return self._around(super().step, *args, **kwargs)  # type: ignore[misc]

    step.hooked = True  # type: ignore[attr-defined]  # by PyTorch, as the step of the class is

    def _around(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``step`` gives, called for some of the parameters."""
        raise NotImplementedError

    def while_backward(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward pass of our own, if what this does is not called in those of the user's."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _with(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Meanwhile its groups are these."""
        whole, self.param_groups = self.param_groups, groups
        try:
            yield
        finally:
            self.param_groups = whole

    def __reduce__(self) -> tuple[Any, ...]:
        how, state = type(self).__mro__[1], cast(Any, self).__getstate__()
        return _made_again, (how, self._of, self._size, state, self._attached)


def narrowed(optimizer: O, how: type[Narrowed], size: int) -> O:
    """The optimizer itself, of a class that takes its parameters as ``how`` does."""
    optimizer.__class__ = _class_of(cast(Any, how), cast(Any, type(optimizer)), size)
    if (own := vars(optimizer).get("step")) is not None:  # a scheduler's, which calls that of the class as it was

        @functools.wraps(own)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer._around(own, *args, **kwargs)

        vars(optimizer)["step"] = types.MethodType(step, optimizer)
    cast(Any, optimizer).begin()
    return optimizer


def check(make: OptimizerFactory, parameters: list[nn.Parameter], how: type[Narrowed], words: str) -> None:
    """Raise ``UsageError`` where small parameters like these have other bits if so few are taken as can be.

    ``words`` say where that is: "in groups".
    """
    some = parameters[:: max(len(parameters) // _TRIED, 1)][:_TRIED]
    found = []
    name = getattr(make, "__name__", "optimizer")
    try:
        for whole in (True, False):
            small = [_small(parameter) for parameter in some]
            optimizer = make(small) if whole else narrowed(make(small), how, 1)
            name = type(optimizer).__name__
            for number in range(_STEPS):
                with optimizer.while_backward() if isinstance(optimizer, Narrowed) else contextlib.nullcontext():
                    torch.autograd.backward(small, [(parameter.detach() - number).cos() for parameter in small])
                optimizer.step()
                optimizer.zero_grad()
            found.append([*small, *tensors_in([optimizer.state[parameter] for parameter in small])])
    except (RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f"{name} takes no step {words} ({error}); leave it as it is.") from error
    if not all(same_bits(*pair) for pair in zip(*found, strict=True)):
        raise UsageError(
            f"{name} computes other numbers {words}: what it does to one parameter depends on others; "
            "leave it as it is."
        )


def parts(group: dict[str, Any], divided: Iterable[list[Tensor]]) -> Iterator[dict[str, Any]]:
    """The group with some parameters each; what a step writes into one of them is in the group then."""
    yield from (_Part(group, parameters) for parameters in divided)


def _small(parameter: Tensor) -> nn.Parameter:
    """The first elements of one like it, of numbers between -1 and 1."""
    shape = [min(size, _LONGEST) for size in parameter.shape]
    numbers = torch.linspace(-1, 1, math.prod(shape), device=computed_on(parameter)).reshape(shape)
    return nn.Parameter(numbers.to(parameter.dtype))


def _made_again(
    how: type[Narrowed], kind: type[torch.optim.Optimizer], size: int, state: dict[str, Any], attached: bool
) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    made: Any = narrowed(optimizer, how, size)
    if attached:
        made.attach()
    return optimizer


@functools.cache
def _class_of(how: Any, kind: Any, size: int) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_of": kind, "_size": size}
    return type(kind.__name__, (how, kind), names)


class _Part(dict[str, Any]):
    """Some parameters of a group, with its settings."""

    def __init__(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        super().__init__(group, params=parameters)
        self._group = group

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "params":
            self._group[key] = value
