"""Optimizers like another one, over other parameters."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]  # of parameters, or groups of them
Groups = tuple[tuple[str | Tensor, ...], ...]
"""What is in each group of an optimizer: parameters of a model by name, and others themselves."""


_NEEDED = ("state", "param_groups", "step", "zero_grad")


def one_of(made: Any) -> torch.optim.Optimizer:
    """What a factory made, ready to train, as those of schedulefree are not; raises ``UsageError`` for no optimizer."""
    if isinstance(made, list | tuple):
        return Optimizers([one_of(each) for each in made])
    if not all(hasattr(made, name) for name in _NEEDED):
        raise UsageError(f"optimizer makes a {type(made).__name__}, which is no torch.optim.Optimizer.")
    if callable(train := getattr(made, "train", None)):
        train()
    return made


class Optimizers(torch.optim.Optimizer):
    """Several as one, whose step takes theirs."""

    def __init__(self, made: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for each in made for group in each.param_groups], {})
        self._made = made
        self._collect()

    def step(self, closure: Any = None) -> Any:
        """Take the step of each."""
        for each in self._made:
            each.step()
        self._collect()

    def _collect(self) -> None:
        self.state: Any = {parameter: state for each in self._made for parameter, state in each.state.items()}


@dataclass(frozen=True)
class LikeGroups:
    """A factory of what ``make`` makes that gives groups of parameters the ``settings`` of another's groups."""

    make: OptimizerFactory
    settings: tuple[dict[str, Any], ...]

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer; of parameters by themselves, with the settings of the first group."""
        given = list(parameters)
        if not isinstance(given[0], dict):
            return self.make(given)
        return self.make([{**own, **group} for own, group in zip(self.settings, given, strict=True)])


@dataclass(frozen=True)
class AsOne:
    """A factory of several optimizers as one; each factory is given the next so many groups of parameters."""

    factories: tuple[tuple[OptimizerFactory, int], ...]

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizers; raises ``ValueError`` for parameters by themselves."""
        given = list(parameters)
        if not isinstance(given[0], dict):
            raise ValueError("there are several optimizers, each with parameters of its own")
        rest = iter(given)
        return one_of([make(list(itertools.islice(rest, count))) for make, count in self.factories])


def own_name(name: str) -> str:
    """What something in a model is called before ``torch.compile`` wraps it, or a part of it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def groups_in(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, beside: Iterable[Tensor] = ()) -> Groups:
    """What is in each of their groups, of the parameters of ``model`` that train and those ``beside`` it."""
    known: dict[int, str | Tensor] = {id(each): each for each in beside if each.requires_grad}
    known |= {id(parameter): own_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = (group["params"] for each in optimizers for group in each.param_groups)
    return tuple(tuple(known[id(each)] for each in group if id(each) in known) for group in groups)


def param_groups(groups: Groups, model: nn.Module) -> list[dict[str, list[Tensor]]]:
    """The same groups, for an optimizer of ``model``, of whose parameters those that train are in them."""
    named = {own_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = ([named.get(each) if isinstance(each, str) else each for each in group] for group in groups)
    return [{"params": [parameter for parameter in group if parameter is not None]} for group in found]


def parameters_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """All parameters of an optimizer's groups."""
    return [parameter for group in groups for parameter in group["params"]]


def hands_on(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    """Whether all that it steps, and all that it keeps, is that of another one."""
    return optimizer.param_groups is inner.param_groups and optimizer.state is inner.state


def optimizers_like(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None
) -> OptimizerFactory:
    """A factory of optimizers of that class, or ``kind``, with the settings of its groups; it is not touched.

    Of one that only hands on to another, as accelerate's does, it is that other one that is made again.
    Raises ``UsageError`` where the class takes more than its settings.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and hands_on(optimizer, inner):
        return optimizers_like(inner)
    kind = kind or type(optimizer)
    signature = inspect.signature(kind)
    settings = {**optimizer.defaults, **optimizer.param_groups[0]}
    known = {name: settings[name] for name in signature.parameters if name in settings and name != "params"}
    try:
        signature.bind([], **known)
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be made again from its settings ({error}); give a factory, "
            "lambda parameters: ..., as the optimizer."
        ) from error
    make = functools.partial(kind, **known)
    if len(optimizer.param_groups) == 1:
        return make
    aside = ("params", "param_names")
    return LikeGroups(make, tuple({k: v for k, v in each.items() if k not in aside} for each in optimizer.param_groups))
