"""An output that is not there until it is used: its shape, type and device, and what it is made of.

Whatever asks for its numbers gets an ordinary tensor, with the gradient that the model's own output has, but for
functions in ``KNOWN``. This file needs torch only, because its text is also pasted into generated models.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import TensorWeakRef

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.output_source import OutputSource

Change = Callable[[Tensor], Tensor]
KNOWN: dict[Any, tuple[Callable[..., Any], ...]] = {}  # what to try of functions, in turn, before the numbers are made


class LazyOutput(Tensor):
    """An output that is not there yet, and has no storage until then."""

    _source: OutputSource
    _tensor: Tensor | None
    _rows: Any  # OutputRows or Expression, as of so many writes as were ``_seen``
    _seen: int
    _view: "tuple[LazyOutput, Change] | None"
    _leaf: bool

    @staticmethod
    def __new__(cls, source: OutputSource, layout: Tensor | None = None, view: Any = None) -> "LazyOutput":
        """One that is made by ``source``, or a ``view`` of such a one, in a ``layout``: that and what changes it."""
        like = source if layout is None else layout
        kind = {"dtype": like.dtype, "device": source.held[0].device}
        self: LazyOutput = Tensor._make_wrapper_subclass(cls, like.shape, **kind)  # type: ignore
        self._source, self._tensor, self._rows, self._view, self._leaf = source, None, None, view, False
        self._seen = source.writes
        if view is None:
            source.output = source.output or TensorWeakRef(self)
        return self

    @classmethod
    def of_source(cls, source: OutputSource, of: Sequence[Tensor]) -> "LazyOutput":
        """What a source makes of such tensors, through which gradients go to these."""
        result: LazyOutput = _Origin.apply(source, *of)  # type: ignore[no-untyped-call]
        return result

    def then(self, change: Change, layout: Tensor) -> "LazyOutput":
        """What a change makes of it: a view where this layout is one, a copy otherwise."""
        result: LazyOutput = _Then.apply(self, change, layout)  # type: ignore[no-untyped-call]
        return result

    def written(self, write: Callable[[Tensor], Any]) -> None:
        """Have gradients go through a write, which scales it or some of it."""
        if self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                _Rescaled.apply(self, write)  # type: ignore[no-untyped-call]

    @property
    def lazily_held(self) -> list[Tensor]:
        """The tensors that stay because of it."""
        return self._source.held

    def made(self) -> Tensor:
        """The ordinary tensor in its place."""
        if self._tensor is None:
            first = None if self._source.output is None else self._source.output()
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
                if self._view is not None:
                    whole = self._view[0].made()
                    with torch.set_grad_enabled(not self._leaf):
                        self._tensor = self._view[1](whole)
                elif first is not None and first is not self:  # of which this is the same without a gradient
                    self._tensor = first.made().detach()
                elif not self.requires_grad:
                    self._tensor = self._source.get()
                elif (found := self._source.of_its_rows()) is not None:
                    self._tensor = found
                else:
                    self._source.get()
                    self._tensor = _Use.apply(self)  # type: ignore[no-untyped-call]
        return self._tensor

    def apart(self) -> Tensor:
        """Its numbers, without which it goes on as before."""
        return self.of(self._source.apart())

    def of(self, output: Tensor) -> Tensor:
        """What it is of what its source makes."""
        return output if self._view is None else self._view[1](self._view[0].of(output))

    @property
    def is_there(self) -> bool:
        """Whether its numbers are."""
        return self._tensor is not None or self._source.made is not None

    @property
    def rows(self) -> Any:
        """What its rows are made of, as long as it is not there; without a gradient, if it is a leaf of its own."""
        if self._rows is None or self.is_there or self._seen != self._source.writes:
            return None
        if self._leaf:
            return None if torch.is_grad_enabled() else self._rows.detached()
        return self._rows if self.requires_grad else self._rows.detached()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**(kwargs or {})}
        first = () if args or func is torch.where or "input" not in given else (given.pop("input"),)
        for known in () if torch.compiler.is_compiling() or "out" in given else KNOWN.get(func, ()):
            if (found := known(func, *first, *args, **given)) is not None:
                return found
        if func in _OF_NO_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # traced, what follows would have no gradient
            return torch.compiler.disable(_with_numbers)(func, args, kwargs or {})
        return _with_numbers(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        first = args[0] if args else None
        if isinstance(first, LazyOutput) and first._view is None and first._source.made is None:
            source = first._source
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return LazyOutput(source)
            if func is torch.ops.aten._to_copy.default and [*(kwargs or {})] == ["dtype"]:
                dtype = kwargs["dtype"]
                return LazyOutput(source.then(lambda output: output.to(dtype), source.shape, dtype))
        args, kwargs = tree_map(_numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _with_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(_ordinary, (args, kwargs))
    return func(*args, **kwargs)


def _numbers(value: Any) -> Any:
    return value.of(value._source.get()) if isinstance(value, LazyOutput) else value


def _ordinary(value: Any) -> Any:
    return value.made() if isinstance(value, LazyOutput) else value


class _Origin(torch.autograd.Function):
    """Gives an output that is not there yet, through which gradients go as if it had been made."""

    @staticmethod
    def forward(ctx: Any, source: OutputSource, *of: Tensor) -> Tensor:
        ctx.save_for_backward(*of)
        ctx.make, ctx.autocast = source.make, source.autocast
        return LazyOutput(source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        again = torch.is_grad_enabled()  # to be differentiated again
        given = of if again else [tensor.detach().requires_grad_(need) for tensor, need in zip(of, wanted, strict=True)]
        with torch.enable_grad(), in_autocast(of[0], ctx.autocast):
            result = ctx.make(*given)
        asked = [tensor for tensor, need in zip(given, wanted, strict=True) if need]
        found = iter(torch.autograd.grad(result, asked, grad, create_graph=again))
        return None, *(next(found) if need else None for need in wanted)


class _Then(torch.autograd.Function):
    """What a change makes of an output: a view of it where the layout is one, a copy otherwise."""

    @staticmethod
    def forward(ctx: Any, output: LazyOutput, change: Change, layout: Tensor) -> Tensor:
        ctx.change, ctx.of = change, (output.shape, output.dtype)
        if layout._is_view():
            return LazyOutput(output._source, layout, (output, change))
        return LazyOutput(output._source.then(lambda whole: change(output.of(whole)), layout.shape, layout.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype = ctx.of
        with torch.enable_grad():
            leaf = torch.empty(shape, dtype=dtype, device=grad.device, requires_grad=True)
            changed = ctx.change(leaf)
        (found,) = torch.autograd.grad(changed, leaf, grad, create_graph=torch.is_grad_enabled())
        return found, None, None


class _Rescaled(torch.autograd.Function):
    """An output that ``write`` has scaled, or some of it, in place; gradients are scaled alike."""

    @staticmethod
    def forward(ctx: Any, output: LazyOutput, write: Callable[[Tensor], Any]) -> Tensor:
        ctx.mark_dirty(output)
        ctx.write = write
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slope = grad.clone()
        ctx.write(slope)
        return slope, None


class _Use(torch.autograd.Function):
    """The ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, output: LazyOutput) -> Tensor:
        made = output._source.get()
        used: Tensor = made.new_empty(0).set_(made)  # type: ignore  # fakes would keep a storage that is given
        output._source.made = used.detach()  # it counts the same writes
        return used  # no view, which nobody could write

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# What tensors are asked for that takes no numbers, and casts, which come with the numbers.
_ASKED = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_sparse")
_CALLED = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "detach", "to", "float")
_OF_NO_NUMBERS = {
    *(getattr(Tensor, name).__get__ for name in _ASKED),
    *(getattr(Tensor, name) for name in (*_CALLED, "double", "half", "bfloat16")),
}
