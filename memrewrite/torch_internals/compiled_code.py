"""The Python code that Inductor made of graphs, run on fake tensors with its kernels left out.

Private API: there is no public way to ask what a compiled graph allocates, but Inductor's code is plain Python: it asks
for each buffer, calls kernels and libraries, and lets go of each buffer after its last use. It comes with a function
that makes arguments of the right sizes. The same code stands there where a graph comes from Inductor's caches.
Read in PyTorch 2.11 to 2.14.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    from torch._functorch import config as _functorch
    from torch._inductor.output_code import CompiledFxGraph as _Graph

require("_functorch.config.force_non_lazy_backward_lowering", "_C._dynamo.guards.assert_size_stride")

_ARGUMENTS = "get_args"
_BESIDE_ARGUMENTS = ("rand_strided", "_shared_storage_")  # what else has a name there: of several views, the storage
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

    def named_arguments(self) -> dict[str, Any]:
        """New arguments in their order, by the names of the graph's placeholders; there have to be any."""
        assert self.arguments is not None  # noqa: S101  (see there)
        names = [name for name in self.arguments.__code__.co_varnames if not name.startswith(_BESIDE_ARGUMENTS)]
        return dict(zip(names, self.arguments(), strict=True))

    def run(self, arguments: list[Any]) -> tuple[Any, ...]:
        """Its outputs; ``arguments`` are emptied as it takes them. To be called in a fake tensor mode.

        Raises whatever its code does where that asks for values.
        """
        names = {name: _stand_in(name, value) for name, value in self._names().items()}
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


def _with_globals(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a kernel does here."""


class _Kernel:
    """A kernel of Triton's, which is started by ``run``."""

    run = staticmethod(_nothing)


def _stand_in(name: str, value: Any) -> Any:
    """What code has under a name, for fake tensors."""
    if name.startswith("empty_strided_"):
        return _empty(name.removeprefix("empty_strided_").partition("_")[0])
    if name == "reinterpret_tensor":
        return _reinterpreted
    if name.startswith(("assert_", "cpp_")):
        return _nothing
    is_kernel = hasattr(value, "run") and not isinstance(value, type | types.ModuleType)
    return _Kernel() if is_kernel else value


def _empty(device: str) -> Callable[..., Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpreted(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    """Another view of a tensor's storage, ``offset`` elements after it begins."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
