"""The tensors a function holds: in its closure, its defaults, the globals its code names, partials and objects.

A loss function ``lambda output: criterion(output, target)`` holds a target, which lives as long as the step does and
which no call shows. So may a forward hold a frozen teacher that is a global of its file.
"""

import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.lines import is_users
from memrewrite.state.containers import in_closure

_DEEPEST = 4  # containers, objects and functions inside one another: a method of a trainer reaches everything


@dataclass(frozen=True)
class Targets:
    """The tensors a loss function holds: those that come with each batch, and those of its own modules.

    ``beside`` are those that the model's code holds and that are no part of the model; ``own`` are parameters of the
    model that the loss function names, where another model stands for it.
    """

    of_batch: tuple[Tensor, ...] = ()
    fixed: tuple[Tensor, ...] = ()
    beside: tuple[Tensor, ...] = ()
    own: tuple[Tensor, ...] = ()

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (*self.of_batch, *self.fixed, *self.beside)

    @property
    def buffers(self) -> list[Tensor]:
        """Those that are no parameters and come with no batch."""
        return [tensor for tensor in (*self.fixed, *self.beside) if not isinstance(tensor, nn.Parameter)]

    @property
    def changing(self) -> list[Tensor]:
        """Those that a step may change: buffers, and what gets a gradient."""
        return self.buffers + [tensor for tensor in self.all if tensor.requires_grad]


def held_by(function: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that ``function`` holds, each once: those it holds itself, and those of modules it holds."""
    own: dict[int, Tensor] = {}
    of_modules: dict[int, Tensor] = {}
    for value in in_reach(function):
        if isinstance(value, Tensor):
            own[id(value)] = value
        elif isinstance(value, nn.Module):
            found = [*value.parameters(), *value.buffers()]
            found += [each for part in value.modules() for each in vars(part).values() if isinstance(each, Tensor)]
            of_modules.update({id(tensor): tensor for tensor in found})
    return list(own.values()), [tensor for key, tensor in of_modules.items() if key not in own]


def in_reach(start: Any) -> Iterator[Any]:
    """The value itself and what it leads to, each once, but not what is inside of tensors, modules and optimizers."""
    seen: set[int] = set()

    def look(value: Any, depth: int) -> Iterator[Any]:
        if id(value) in seen or depth > _DEEPEST or isinstance(value, torch.optim.Optimizer):  # counted by itself
            return
        seen.add(id(value))
        yield value
        for inner in () if isinstance(value, Tensor | nn.Module) else _inside(value):
            yield from look(inner, depth + 1)

    return look(start, 0)


def held_beside(model: nn.Module) -> list[Tensor]:
    """Tensors that the code of a model's layers holds, each once: what forward and the methods it calls name."""
    found: dict[int, Tensor] = {}
    for own, of_modules in map(held_by, user_functions(model)):
        found |= {id(tensor): tensor for tensor in (*own, *of_modules)}
    return list(found.values())


def named_beside(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The globals that these functions name, and what their closures hold, by name."""
    for function in user_functions(model):
        names = names_in(function.__code__)
        yield from ((name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__)
        yield from in_closure(function).items()


def user_functions(model: nn.Module) -> Iterator[types.FunctionType]:
    """The user's functions that a call of a model may run as methods of its layers."""
    return (method for kind in {type(module): None for module in model.modules()} for method in _methods(kind))


def _methods(kind: type) -> list[types.FunctionType]:
    """The user's functions that a call of a module of this class may run, by the names that their code has."""
    theirs: dict[str, types.FunctionType] = {}
    for each in reversed(kind.__mro__):
        theirs |= {name: f for name, f in vars(each).items() if isinstance(f, types.FunctionType)}
    found, names = dict[str, types.FunctionType](), ["forward", "__call__"]
    while names:
        method = theirs.get(name := names.pop())
        if name not in found and method is not None and is_users(method.__code__.co_filename):
            found[name] = method
            names += method.__code__.co_names
    return list(found.values())


def _inside(value: Any) -> Iterator[Any]:
    """What a container, a function or a plain object refers to; nothing for what is no carrier of tensors."""
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _named(value)
    elif not isinstance(value, type | types.ModuleType) and hasattr(value, "__dict__"):
        yield from list(vars(value).values())
        yield vars(type(value)).get("__call__")  # whose code may name globals


def _named(function: types.FunctionType) -> Iterator[Any]:
    """What a Python function can reach by a name; of other functions in globals, those of its own file."""
    yield from in_closure(function).values()
    yield from (function.__defaults__ or (), function.__kwdefaults__ or {})
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        mine = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
        if mine or isinstance(value, Tensor | nn.Module | functools.partial | list | tuple | dict):
            yield value


@functools.lru_cache(8192)
def names_in(code: types.CodeType, instruction: str = "LOAD_GLOBAL") -> frozenset[str]:
    """The names of globals that a function and the functions in it look up, or those of another ``instruction``."""
    inner = [names_in(each, instruction) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == instruction).union(*inner)
