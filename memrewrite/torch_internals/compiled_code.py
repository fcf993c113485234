"""The Python code that Inductor made of graphs, run on fake tensors with its kernels left out.

Private API: there is no public way to ask what a compiled graph allocates, but Inductor's code is plain Python: it asks
for each buffer, calls kernels and libraries, and lets go of each buffer after its last use. It comes with a function
that makes arguments of the right sizes. The same code stands there where a graph comes from Inductor's caches.
Read in PyTorch 2.11 to 2.14.
"""

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memrewrite.torch_internals.dispatch_modes import Layer, Recall
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    from torch._functorch import config as _functorch
    from torch._inductor.output_code import CompiledFxGraph as _Graph

require("_functorch.config.force_non_lazy_backward_lowering", "_C._dynamo.guards.assert_size_stride")

_ARGUMENTS, _COLLECTIVES = "get_args", "_c10d_functional"
_BESIDE_ARGUMENTS = ("rand_strided", "_shared_storage_")  # what else has a name there: of several views, the storage
_SYMBOL = re.compile(r"[su]\d+")
_BESIDE: ContextVar[bool] = ContextVar("beside", default=False)


@dataclass(frozen=True)
class CompiledCode:
    """The code of one compiled graph, forward or backward."""

    is_backward: bool
    _call: Callable[..., Any]

    @property
    def arguments(self) -> types.FunctionType | None:
        """Makes arguments, fake ones in a fake tensor mode; None where the code does not tell, as that in C++."""
        found = self._names().get(_ARGUMENTS)
        return found if isinstance(found, types.FunctionType) else None

    @property
    def communicates(self) -> bool:
        """Whether it has collectives, which all processes call in one order; so where it does not tell."""
        named = (getattr(self._call, "__func__", None), *self._names().values())
        functions = (each for each in named if isinstance(each, types.FunctionType))
        return self.arguments is None or any(_COLLECTIVES in each.__code__.co_names for each in functions)

    def named_arguments(self) -> dict[str, Any]:
        """New arguments in their order, by the names of the graph's placeholders; there have to be any."""
        make = self.arguments
        assert make is not None  # noqa: S101  (see there)
        names = [name for name in make.__code__.co_varnames if not name.startswith(_BESIDE_ARGUMENTS)]
        given = _with_globals(make, self._names() | self._sizes(make))()
        return dict(zip(names, given, strict=True))

    def _sizes(self, arguments: Callable[..., Any]) -> dict[str, int]:
        """The symbols of sizes that arguments are made by, as numbers: PyTorch 2.13 on writes these where several of
        them lie in one storage, and numbers for all else. The code says which argument each of them is."""
        if not any(_SYMBOL.fullmatch(name) for name in arguments.__code__.co_names):
            return {}
        literals = ((name, each.value) for name, each in _assigned(arguments) if isinstance(each, ast.Constant))
        numbers = {name: value for name, value in literals if isinstance(value, int)}
        named = ((name, each.id) for name, each in _assigned(self._call) if isinstance(each, ast.Name))
        return {name: numbers[argument] for name, argument in named if argument in numbers}

    def run(self, arguments: list[Any], buffers: "Buffers") -> tuple[Any, ...]:
        """Its outputs; ``arguments`` are emptied as it takes them. To be called in a fake tensor mode.

        Raises whatever its code does where that asks for values.
        """
        names = {name: _stand_in(name, value, buffers) for name, value in self._names().items()}
        for name, value in names.items():
            if isinstance(value, types.FunctionType) and value.__globals__ is self._names():
                names[name] = _with_globals(value, names)
        if not isinstance(self._call, types.MethodType):
            return tuple(_with_globals(self._call, names)(arguments))
        runner = types.SimpleNamespace(**vars(self._call.__self__))
        runner.partitions = [names[each.__name__] for each in getattr(runner, "partitions", ())]
        return tuple(_with_globals(self._call.__func__, names)(runner, arguments))

    def _names(self) -> dict[str, Any]:
        function = getattr(self._call, "__func__", self._call)
        return getattr(function, "__globals__", {})


@contextmanager
def compiled_codes() -> Iterator[list[CompiledCode]]:
    """The code of each graph that Inductor compiles meanwhile, or takes from its caches; backward's at once, too.

    Without what is compiled ``beside`` it.
    """
    found: list[CompiledCode] = []
    finish = _Graph.post_compile

    def post_compile(graph: Any, inputs: Any, constants: Any, told: Any) -> None:
        call = graph.current_callable  # as it is, before CUDA graphs or copies of inputs are put around it
        finish(graph, inputs, constants, told)
        if call is not None and not _BESIDE.get():
            found.append(CompiledCode(bool(told.get("is_backward")), call))

    at_once = _functorch.patch(force_non_lazy_backward_lowering=True)
    with mock.patch.object(_Graph, "post_compile", post_compile), at_once:
        yield found


@contextmanager
def beside() -> Iterator[None]:
    """What is compiled meanwhile is run while a graph is compiled, and is no part of it."""
    token = _BESIDE.set(True)
    try:
        yield
    finally:
        _BESIDE.reset(token)


def is_beside() -> bool:
    """Whether what is compiled now is run while a graph is compiled, and is no part of it."""
    return _BESIDE.get()


def _assigned(function: Callable[..., Any]) -> Iterator[tuple[str, ast.expr]]:
    """The names that single values are assigned to in the source of a function, with these."""
    for each in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            yield each.targets[0].id, each.value


def _with_globals(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a kernel does here."""


class _Kernel:
    """A kernel of Triton's, which is started by ``run``."""

    run = staticmethod(_nothing)


class Buffers:
    """Makes the buffers that code asks for, and views of them, past the dispatcher: most of its calls are for these.

    ``tell`` is called with each that has a storage of its own, as no dispatch mode sees them.
    """

    def __init__(self, recall: Recall, tell: Callable[[Tensor], None]) -> None:
        self._recall, self._tell = recall, tell

    def empty(self, device: str, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """A new tensor on the current device of a type."""
        made = self._recall.empty(size, stride, dtype, _current(device))
        self._tell(made)
        return made

    def reinterpret(self, tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
        """Another view of a tensor's storage, ``offset`` elements after it begins."""
        start = int(tensor.storage_offset()) + offset
        if type(tensor) is not FakeTensor:  # a constant of the code's, which fake tensors may not meet
            return torch.as_strided(tensor, size, stride, start)
        return self._recall.view(tensor, size, stride, start)


def _current(kind: str) -> torch.device:
    """The device of a type that code runs on now: it may use several."""
    if kind == "cpu":
        return torch.device(kind)
    module = torch.get_device_module(kind)
    return torch.device(kind, module.current_device() if module.is_initialized() else 0)


class Written(Layer):
    """Runs no operator of PyTorch's that is told where to write: in code that is a buffer of the right sizes."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        into = kwargs.get("out") if kwargs and func.namespace == "aten" else None
        return into if type(into) is FakeTensor else self.below(func, types, args, kwargs or {})


def _stand_in(name: str, value: Any, buffers: Buffers) -> Any:
    """What code has under a name, for fake tensors."""
    if name.startswith("empty_strided_"):
        return functools.partial(buffers.empty, name.removeprefix("empty_strided_").partition("_")[0])
    if name == "reinterpret_tensor":
        return buffers.reinterpret
    if name.startswith(("assert_", "cpp_")):
        return _nothing
    is_kernel = hasattr(value, "run") and not isinstance(value, type | types.ModuleType)
    return _Kernel() if is_kernel else value
