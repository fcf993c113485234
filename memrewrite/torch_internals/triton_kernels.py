"""Launches of Triton's kernels: seen before they are made, and which tensors they write. Read in PyTorch 2.11 to 2.15.

``kernel[grid](...)`` ends in ``run`` of the kernel's class (Triton 3.6 to 3.9), of which nothing public tells. What a
kernel writes, PyTorch reads from the code that Triton makes of it; where Triton interprets (``TRITON_INTERPRET``) there
is none, and what is stored to is seen while it runs. Whoever cannot tell says that all is written.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memrewrite.records.tensor_like import TensorLike
from memrewrite.torch_internals.logs import quiet
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.torch_internals.subclasses import subclasses
from memrewrite.torch_internals.versions import private_imports

Arguments = dict[str, Any]  # by the names that the kernel has for them


@dataclass(frozen=True)
class Launch:
    """``kernel[grid](*args, **kwargs)``."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Any:
        """The Python function that the kernel is made of."""
        return _compiled(self.kernel).fn

    def variants(self) -> Iterator[tuple[Arguments, Arguments]]:
        """For each way that the kernel may be tuned: what is then chosen for it, and all of its arguments."""
        return _variants(self.kernel, self.args, self.kwargs)


Replacement = Callable[[Launch], bool]
_REPLACEMENTS: list[Replacement | None] = []
_OURS = "memrewrite_replaces"  # of a function that hands launches to the last of them


@process_wide
@contextmanager
def launches_replaced(replacement: Replacement | None) -> Iterator[None]:
    """Meanwhile launches are handed to ``replacement``, and made where it says no; with None, all are made.

    Kernels that ``torch.library.wrap_triton`` has wrapped are no other ones then.
    """
    with ExitStack() as stack:
        for kind in _kinds():
            stack.enter_context(mock.patch.object(kind, "run", _handed_on(vars(kind)["run"])))
        if "triton" in sys.modules:
            with private_imports():
                from torch._library.triton import set_wrap_triton_enabled

            stack.enter_context(set_wrap_triton_enabled(replacement is None))
        _REPLACEMENTS.append(replacement)
        stack.callback(_REPLACEMENTS.pop)
        yield


def _kinds() -> list[Any]:
    """The classes of Triton's that have a way to run of their own which is still Triton's."""
    jit = sys.modules.get("triton.runtime.jit")
    found = []
    for kind in [] if jit is None else [jit.KernelInterface, *subclasses(jit.KernelInterface)]:
        run = vars(kind).get("run")
        if kind.__module__.startswith("triton.") and run is not None and not hasattr(run, _OURS):
            found.append(kind)
    return found


def _handed_on(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        replacement = _REPLACEMENTS[-1] if _REPLACEMENTS else None  # another thread may get here as it ends
        if replacement is not None and not kwargs.get("warmup"):
            given = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
            if replacement(Launch(kernel, kwargs["grid"], args, given)):
                return None
        return own(kernel, *args, **kwargs)

    setattr(run, _OURS, True)
    return run


def _layers(kernel: Any) -> list[Any]:
    """What tunes a kernel, from outside, and last what is compiled or interpreted."""
    return [kernel] if inspect.isfunction(kernel.fn) else [kernel, *_layers(kernel.fn)]


def _compiled(kernel: Any) -> Any:
    return _layers(kernel)[-1]


def _variants(kernel: Any, args: tuple[Any, ...], kwargs: Arguments) -> Iterator[tuple[Arguments, Arguments]]:
    if inspect.isfunction(kernel.fn):
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(*args, **{n: v for n, v in kwargs.items() if n in signature.parameters})
        bound.apply_defaults()
        yield {}, bound.arguments
    elif hasattr(kernel, "configs"):
        for chosen in _distinct([config.kwargs for config in kernel.configs]):
            for further, arguments in _variants(kernel.fn, args, kwargs | chosen):
                yield chosen | further, arguments
    else:  # heuristics, each of which sees what those before it gave
        for name, heuristic in kernel.values.items():
            kwargs = kwargs | {name: heuristic({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs})}
        yield from _variants(kernel.fn, args, kwargs)


def _distinct(choices: Sequence[Arguments]) -> list[Arguments]:
    return [each for i, each in enumerate(choices) if each not in choices[:i]]


Variant = tuple[tuple[int, ...], Arguments]  # the grid, and arguments in words: tensors as what they are like


def written_by(kernel: Any, variants: Sequence[Variant]) -> set[str]:
    """The names of the arguments that a kernel may write, launched in one of these ways.

    Raises nothing: a kernel whose writes cannot be told is one that writes all of its tensors.
    """
    arguments = variants[0][1]
    everything = {name for name, value in arguments.items() if any(map(_is_like, tree_leaves(value)))}
    if not all(_is_like(arguments[name]) for name in everything) or _has_hooks(kernel):
        return everything
    interpreted = type(_compiled(kernel)).__name__ == "InterpretedFunction"
    told = _written_where_interpreted if interpreted else _written_in_code
    return _written_to_tune(kernel) & everything | told(_compiled(kernel), variants, everything)


def _is_like(value: Any) -> bool:
    return isinstance(value, TensorLike)


def _has_hooks(kernel: Any) -> bool:
    """Whether Python code of the user's is called with the arguments before or after the kernel."""
    named = ("user_defined_pre_hook", "user_defined_post_hook", "pre_run_hooks")
    return any(
        any(getattr(each, name, None) for name in named)
        or any(getattr(config, "pre_hook", None) for config in getattr(each, "configs", ()))
        for each in _layers(kernel)
    )


def _written_to_tune(kernel: Any) -> set[str]:
    """What is set to zero, or put back, where several ways are tried."""
    names = ("reset_to_zero", "restore_value")
    return {found for each in _layers(kernel) for name in names for found in getattr(each, name, ())}


def _written_in_code(kernel: Any, variants: Sequence[Variant], everything: set[str]) -> set[str]:
    """What is written in the code that Triton makes for this device; all of it where it makes none."""
    with private_imports():
        from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table

    number, none = kernel_side_table.add_kernel(kernel), kernel_side_table.add_constant_args({})
    found: set[str] = set()
    for _, words in variants:
        given = {name: torch.empty(2, dtype=v.dtype) if _is_like(v) else v for name, v in words.items()}
        with quiet():
            found |= {*get_mutated_tensors(number, none, given, {})} & everything
        if found >= everything:
            break
    return found


def _written_where_interpreted(kernel: Any, variants: Sequence[Variant], everything: set[str]) -> set[str]:
    """What is written as the kernel is run in each of these ways."""
    found: set[str] = set()
    for grid, words in variants:
        given = {name: _random(value) if _is_like(value) else value for name, value in words.items()}
        try:
            with _stores(given) as stored:
                kernel[grid](**given)
        except Exception:  # whatever the kernel says of numbers that are not its own
            return everything
        found |= stored
    return found or everything


def _random(like: TensorLike) -> Tensor:
    """A tensor on the CPU of numbers between 0 and 1, or of whole zeros."""
    tensor = replace(like, device=torch.device("cpu")).filled(0)
    return tensor.uniform_(generator=torch.Generator()) if tensor.is_floating_point() else tensor


# Which arguments of the functions that store are the addresses, and whether there is anything to store there.
_STORES = {"store": (0, 2), "atomic_rmw": (1, 3), "atomic_cas": (0, None)}


@contextmanager
def _stores(given: Mapping[str, Any]) -> Iterator[set[str]]:
    """The names of the tensors that Triton's interpreter stores to meanwhile."""
    places = {name: _place(value) for name, value in given.items() if isinstance(value, Tensor)}
    found: set[str] = set()
    module: Any = sys.modules["triton.runtime.interpreter"]

    def watched(own: Callable[..., Any], at: int, masked: int | None) -> Callable[..., Any]:
        def store(*args: Any) -> Any:
            addresses = args[at] if masked is None else args[at][args[masked] != 0]
            found.update(name for name, (a, b) in places.items() if ((addresses >= a) & (addresses < b)).any())
            return own(*args)

        return store

    functions = {name: watched(getattr(module._interpreter, name), *which) for name, which in _STORES.items()}
    with mock.patch.object(module, "_interpreter", _Watched(module._interpreter, functions)):
        yield found


class _Watched:
    """Triton's interpreter with some functions replaced."""

    def __init__(self, interpreter: Any, replaced: Mapping[str, Callable[..., Any]]) -> None:
        self._interpreter = interpreter
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)


def _place(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
