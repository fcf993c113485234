"""Operators below all modes: other kernels for them, and those of autocast and autograd. Read in PyTorch 2.11 to 2.15.

What C++ calls inside of an operator is seen by no mode and no patch, only by the dispatcher.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memrewrite.torch_internals.operators import OpOverload
from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    # A registration that lasts as long as a context.
    from torch.library import _scoped_library

require(
    "_C._AutoDispatchBelowAutograd",
    "_C._ExcludeDispatchKeyGuard",
    "_C._dispatch_get_registrations_for_dispatch_key",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dispatch_keyset_full_after",
    "library.get_kernel",
)

Kernel = Callable[[OpOverload, Any, tuple[Any, ...], dict[str, Any]], Any]  # operator, keys of the call, its arguments


@contextlib.contextmanager
def kernels_in_this_thread(kernels: Mapping[tuple[str, str], Kernel]) -> Iterator[None]:
    """Run ``kernels``, by name of an ATen operator and dispatch key, in place of what is registered there.

    Operators that C++ calls inside others are seen by no mode and no patch, only by the dispatcher. Registrations
    hold for all threads, so that others are led to what was there before; names that PyTorch lacks are left out.
    """
    here = threading.get_ident()
    with _scoped_library("aten", "IMPL") as library:
        for (name, key), kernel in kernels.items():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if isinstance(operator, OpOverload):
                instead = _only_in(here, operator, key, kernel)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the dispatcher warns of kernels that are overridden
                    library.impl(name, instead, key, with_keyset=True)
        yield


def _only_in(thread: int, operator: OpOverload, key: str, kernel: Kernel) -> Callable[..., Any]:
    cast = key.startswith("Autocast") and not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    before = None if cast else torch.library.get_kernel(operator, key)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return kernel(operator, keys, args, kwargs)
        if before is None:
            return beyond_autocast(operator, keys, args, kwargs)
        return before.call_boxed(keys, *args, **kwargs)

    return run


def beyond_autocast(operator: OpOverload, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Go on with a call that autocast of the CPU was asked about as if it had nothing to say; it stays on inside."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
    return operator.redispatch(keys & after, *args, **kwargs)


# What is called inside goes to the kernels below autograd, as an operator's own derivative formula calls them.
below_autograd = torch._C._AutoDispatchBelowAutograd


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast of the CPU is off, as it is inside its own kernels; ``torch.autocast`` is slower, at every operator."""
    guard: contextlib.AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    )
    return guard


def autocast_operators(device: str) -> frozenset[str]:
    """The names of the ATen operators that autocast of ``device`` has a rule for, in builds without it, too."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))
