"""Functions of tensors that Inductor compiles, called without Dynamo where it has seen such a call before.

Dynamo looks at all that a call is given, which takes longer than a small kernel. What it decides by is the same in a
call of the same shapes, strides, types and devices under the same settings: then the code that it chose is run as it
was, while autograd records nothing; in another process, too. Torch only: this file's text is also pasted into generated
models.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.runtime.kernel_files import Code, Order, code_kept, file_of_code, keep_code, said_of

Given = Sequence[Any]  # tensors, and None where there is none
Function = Callable[[Given], Sequence[Tensor]]
Direct = Callable[[Given], list[Tensor]]
_MOST = 4096  # calls that a kernel knows at once

# Inductor stores what two kernels read, rather than have both compute it, once that reads 4 tensors or takes 30
# operations: in the backward of a norm with a rotary embedding after it, the gradient of the norm's result, which
# kernels along rows and across them read, of the size of that. Such values are read from what the kernel is given.
_SETTINGS = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 16, "realize_opcount_threshold": 128}


class _Calls(threading.local):
    """Those of compiled code since this was emptied, in this thread: a code, what it was given and what it gave."""

    def __init__(self) -> None:
        self.made: list[tuple[Code, tuple[Any, ...], Sequence[Tensor]]] = []


class Kernel:
    """``function`` of a list of tensors, as it is or compiled; ``name`` is unique to it."""

    def __init__(self, function: Function, name: str) -> None:
        self._function, self._name = function, name
        self._by_dynamo: dict[tuple[Any, ...], Function] = {}
        self._known: dict[tuple[Any, ...], Direct] = {}
        self._calls = _Calls()

    def plain(self, given: Given) -> list[Tensor]:
        """What the function gives, uncompiled."""
        with _usual_algorithms():
            return list(self._function(given))

    def __call__(self, given: Given) -> list[Tensor]:
        """What the function gives, compiled."""
        look, records = look_of(given), torch.is_grad_enabled()
        known = None if records else self._known.get(look)
        if known is not None:
            return known(given)
        tensors = [t if t is None else t.detach() for t in given]  # no parameter, nothing that needs a gradient
        with _usual_algorithms():
            file = None if records or len(self._known) >= _MOST else self.file(look)
            found = None if file is None else code_kept(file)
            if found is not None:
                self._known[look] = _direct(*found)
                return self._known[look](tensors)
            results = list(self._compiled(tensors)(tensors))
        calls, self._calls.made = self._calls.made, []
        if len(calls) == 1 and file is not None:
            code, args, made = calls[0]
            order = _order_of(args, made, tensors, results)
            if order is not None:
                self._known[look] = _direct(code, order)
                keep_code(code, order, file)
        return results

    def file(self, look: tuple[Any, ...]) -> str:
        """Where code for such a call is, kept by another process, or is to be."""
        with torch._inductor.config.patch(_SETTINGS):
            return file_of_code(self._said, look)

    @functools.cached_property
    def _said(self) -> str:
        return said_of((self._name, self._function))

    def _compiled(self, given: Given) -> Function:
        """The function for tensors of such types and dimensions.

        PyTorch's compiler runs a code as it is once it has compiled it a few times, so that each kind has its own.
        """
        kinds = tuple(t if t is None else (t.dtype, t.dim()) for t in given)
        if kinds not in self._by_dynamo:
            old: Any = self._function
            code = old.__code__.replace(co_name=f"{self._name}_{hash(kinds):x}".replace("-", "_"))
            own = types.FunctionType(code, old.__globals__, self._name, None, old.__closure__)
            self._by_dynamo[kinds] = torch.compile(own, backend=self._inductor)
        return self._by_dynamo[kinds]

    def _inductor(self, graph: Any, inputs: Any) -> Callable[..., Sequence[Tensor]]:
        """Inductor's code for a graph, whose calls are noted."""
        with torch._inductor.config.patch(_SETTINGS):
            code = Code(graph, inputs)

        def noted(*args: Any) -> Sequence[Tensor]:
            results = code(*args)
            self._calls.made.append((code, args, results))
            return results

        return noted


def look_of(given: Given) -> tuple[Any, ...]:
    """By what calls are told apart."""
    kind = given[0].device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    settings = autocast, torch.is_inference_mode_enabled(), torch.get_default_dtype()
    return (*settings, *[t if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in given])


def _order_of(args: tuple[Any, ...], made: Sequence[Tensor], given: Given, results: list[Tensor]) -> Order | None:
    """How code that got ``args`` and ``made`` something is called; None where more was done for the ``results``."""
    places = {id(t): i for i, t in enumerate(given) if t is not None}
    takes = [(None, a) if isinstance(a, int) else (places.get(id(a)), None) for a in args]
    found = {id(t): i for i, t in enumerate(made)}
    if (None, None) in takes or any(id(t) not in found for t in results):
        return None
    return Order(takes, [found[id(t)] for t in results])


def _direct(code: Callable[..., Sequence[Tensor]], order: Order) -> Direct:
    """Calls ``code`` with what is like what was given for what is like the results."""
    takes, gives = order

    def run(tensors: Given) -> list[Tensor]:
        made = code(*[a if i is None else tensors[i] for i, a in takes])
        return [made[i] for i in gives]

    return run


@contextlib.contextmanager
def _usual_algorithms() -> Iterator[None]:
    """Without the setting that asks for deterministic ones: these are, and need not be compiled again for it."""
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not asked[0]:
        yield
        return
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])
