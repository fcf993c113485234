"""Copies of trees of modules that share everything but the modules themselves and their parameters.

``nn.Module`` has no public way to make one: a deep copy doubles buffers and whatever else a module holds. A copy is
made past any ``__init__`` and ``__setattr__``, by the module's own tables. Read in PyTorch 2.11 to 2.15.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def copied(
    root: nn.Module,
    change: Callable[[Tensor], Tensor],
    shell: Callable[[nn.Module], tuple[type, dict[str, Any]]],
) -> dict[int, nn.Module]:
    """The copy of each module of a tree, by the ``id`` of what it is a copy of.

    A parameter becomes one of what ``change`` makes of it, the same for all that share it. ``shell`` gives the class of
    a copy and its attributes, but for parameters, buffers and children.
    """
    made: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}

    def parameter_of(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in parameters:
            parameters[id(parameter)] = nn.Parameter(change(parameter), requires_grad=parameter.requires_grad)
        return parameters[id(parameter)]

    def copy_of(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        kind, state = shell(module)
        result: nn.Module = object.__new__(kind)
        made[id(module)] = result
        vars(result).update({name: value for name, value in state.items() if name != "_compiled_call_impl"})
        vars(result).update(
            _parameters={name: parameter_of(each) for name, each in module._parameters.items()},
            _buffers={**module._buffers},
            _modules={name: None if each is None else copy_of(each) for name, each in module._modules.items()},
        )
        return result

    copy_of(root)
    return made


def with_own_hooks(module: nn.Module) -> tuple[type, dict[str, Any]]:
    """The class and the attributes of a copy, whose hooks, and what is known of them, are not those of the module."""
    tables = {k: type(each)(each) for k, each in vars(module).items() if "_hooks" in k and isinstance(each, dict)}
    return type(module), vars(module) | tables
