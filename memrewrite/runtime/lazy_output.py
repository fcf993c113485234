"""An output that is made when it is first used: logits beside a loss, which few loops look at.

Until then it is its shape, type and device, and what it is made of: a value that the program has anyway, and weights.
Whatever asks for its numbers gets an ordinary tensor, with the gradient that the model's own output has. Cross-entropy
of logits does not ask for them: it makes some rows at a time, of views and casts of the output, too.

This file needs torch only, because its text is also pasted into generated models.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.output_rows import LOGARITHMS, MOVES, SCALED, OutputRows
from memrewrite.runtime.output_source import OutputSource
from memrewrite.runtime.segment import OWN, autocast_dtype

Types = tuple[tuple[torch.dtype | None, torch.dtype, torch.dtype], ...]
InRows = tuple[tuple[tuple[Any, ...], ...], int, bool]
Change = Callable[[Tensor], Tensor]


def lazy_output(
    module: nn.Module,
    make: Callable[..., Tensor],
    sizes: Sequence[int],
    types: Types,
    names: Sequence[str],
    in_rows: InRows | None,
    *of: Tensor,
) -> Tensor:
    """``make(*of)``, which runs once the result is used; the first of them is a value, the others have ``names``.

    With ``in_rows`` it is the product of the value with a weight, and its bias, and those steps: losses are then made
    so many rows at a time, or fused, as by ``linear_cross_entropy``. Of ``sizes``, -1 is that of the value's first
    dimension, -2 of its second. ``types`` say what type the result is of under autocast to the first type, None for
    without, if the value is of the second. Where it is of none of these, in inference mode, which counts no writes, and
    where compilers look, the result is made at once.
    """
    value = of[0]
    counted = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
    autocast = autocast_dtype(value.device.type)
    found = [result for cast, given, result in types if (cast, given) == (autocast, value.dtype)] if counted else []
    if not found or any(tensor.is_inference() for tensor in of):
        return make(*of)
    shape = torch.Size(size if size >= 0 else value.shape[-1 - size] for size in sizes)
    promise = getattr(type(module), OWN).promise
    source = OutputSource(make, of, ("what it is made of", *names), shape, found[0], autocast, promise)
    result: LazyOutput = _Origin.apply(source, *of)  # type: ignore[no-untyped-call]
    if in_rows is not None:
        layout = torch.empty(shape, dtype=source.dtype, device="meta")
        result._rows = OutputRows(value, of[1], of[2] if len(of) > 2 else None, *in_rows, layout)
    return result


class LazyOutput(Tensor):
    """An output that is not there yet, and has no storage until then."""

    _source: OutputSource
    _tensor: Tensor | None
    _rows: OutputRows | None
    _view: "tuple[LazyOutput, Change] | None"
    _leaf: bool

    @staticmethod
    def __new__(cls, source: OutputSource, layout: Tensor | None = None, view: Any = None) -> "LazyOutput":
        """One that is made by ``source``, or a ``view`` of such a one, in a ``layout``: that and what changes it."""
        like = source if layout is None else layout
        kind = {"dtype": like.dtype, "device": source.held[0].device}
        self: LazyOutput = Tensor._make_wrapper_subclass(cls, like.shape, **kind)  # type: ignore
        self._source, self._tensor, self._rows, self._view, self._leaf = source, None, None, view, False
        if view is None:
            source.output = source.output or TensorWeakRef(self)
        return self

    @property
    def lazily_held(self) -> list[Tensor]:
        """The tensors that stay because of it."""
        return self._source.held

    def made(self) -> Tensor:
        """The ordinary tensor in its place."""
        if self._tensor is None:
            first = None if self._source.output is None else self._source.output()
            self._source.get()
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
                if self._view is not None:
                    whole = self._view[0].made()
                    with torch.set_grad_enabled(not self._leaf):
                        self._tensor = self._view[1](whole)
                elif first is not None and first is not self:  # of which this is the same without a gradient
                    self._tensor = first.made().detach()
                else:
                    self._tensor = _Use.apply(self) if self.requires_grad else self._source.get()  # type: ignore
        return self._tensor

    def apart(self) -> Tensor:
        """Its numbers, without which it goes on as before."""
        return self.of(self._source.apart())

    def of(self, output: Tensor) -> Tensor:
        """What it is of what its source makes."""
        return output if self._view is None else self._view[1](self._view[0].of(output))

    @property
    def rows(self) -> OutputRows | None:
        """What its rows are made of, as long as it is not there; without a gradient, if it is a leaf of its own."""
        if self._rows is None or self._tensor is not None or self._source.made is not None:
            return None
        if self._leaf:
            return None if torch.is_grad_enabled() else self._rows.detached()
        return self._rows if self.requires_grad else self._rows.detached()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = None if torch.compiler.is_compiling() else _KNOWN.get(func)
        if known is not None and (found := known(func, *args, **(kwargs or {}))) is not None:
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


def _in_rows(func: Any, output: Any, *rest: Any, **kwargs: Any) -> LazyOutput | None:
    """What ``func`` makes of an output, not there yet either; None where its rows are no rows of the output."""
    rows = _rows_now(output) if func in LOGARITHMS else output.rows if isinstance(output, LazyOutput) else None
    plain = all(value is None or isinstance(value, _PLAIN_ARGUMENTS) for value in tree_leaves((rest, kwargs)))
    if rows is None or not plain or (func is Tensor.to and [*map(type, rest)] != [torch.dtype]):
        return None

    autocast = output._source.autocast  # which it may be made outside of

    def change(tensor: Tensor) -> Tensor:
        with in_autocast(tensor, autocast):
            changed: Tensor = func(tensor, *rest, **kwargs)
        return changed

    with _disable_current_modes():
        layout = change(rows.layout)
    if layout is rows.layout:
        return output
    if (after := rows.after(func, change, layout, (rest, kwargs))) is None:
        return None
    numbers = func in LOGARITHMS
    of = _copy(output, rows) if numbers else output
    result: LazyOutput = _Then.apply(of, change, after.layout, numbers)  # type: ignore[no-untyped-call]
    if output.requires_grad and not numbers and result._view is not None and not torch.is_grad_enabled():
        result.requires_grad_()  # as PyTorch's views are then
        result._leaf = True
    result._rows = after
    return result


def _copy(output: LazyOutput, rows: OutputRows) -> LazyOutput:
    """The same, which nobody writes; few of its rows are made alone."""
    result: LazyOutput = _Then.apply(output, _itself, torch.empty_like(rows.layout))  # type: ignore[no-untyped-call]
    if result.numel() * _FEW <= output._source.shape.numel():
        result._source.make = lambda *_: rows.detached().made()
    return result


def _detached(func: Any, output: LazyOutput) -> LazyOutput | None:
    """The same without a gradient, its rows too."""
    if (rows := output.rows) is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        alone = func(output) if output._view is None else None
    result = LazyOutput(output._source, rows.layout, (output, func)) if alone is None else alone
    result._rows = rows
    return result


def _loss(func: Any, output: Any, target: Any, size_average: Any, reduce: Any, **options: Any) -> Tensor | None:
    """Cross-entropy of an output that is not there, some rows at a time; None where it has to be there."""
    rows = _rows_now(output)
    if rows is not None and func is functional.nll_loss:
        rows = rows.before_logarithms()
    if rows is None or size_average is not None or reduce is not None or not rows.fit(target, options["reduction"]):
        return None
    output._source.refuse_changed()
    with in_autocast(output, output._source.autocast):
        return _noted(output, rows.loss(target, **options))


def _of_each_row(func: Any, output: Any, *given: Any, **options: Any) -> Tensor | None:
    """A number for each row of an output that is not there, some rows at a time; None where it has to be there."""
    if (rows := _rows_now(output)) is None:
        return None
    output._source.refuse_changed()
    made = rows.gather if func in _GATHER else rows.each
    with in_autocast(output, output._source.autocast):
        return _noted(output, made(func, *given, **options))


def _parts(func: Any, output: Any, *given: Any, dim: int = 0) -> tuple[Tensor, ...] | None:
    """Its parts, not there yet either; None where their rows are no rows of the output."""
    rows = output.rows if isinstance(output, LazyOutput) else None
    size, *others = given if func in _SPLIT else (1, *given)
    if rows is None or dim or any(others) or type(size) is not int or size < 1:
        return None
    if func in _SPLIT:
        return tuple(output[i : i + size] for i in range(0, max(len(output), 1), size))
    return tuple(output[i] for i in range(len(output))) if output.dim() > 2 else None


def _noted(output: LazyOutput, found: Tensor | None) -> Tensor | None:
    """What was made of rows of the output, through which no gradient comes to that."""
    if found is not None and found.requires_grad:
        output._source.lost.append(tuple(output.shape))
    return found


def _rows_now(output: Any) -> OutputRows | None:
    """The rows of an output that is not there, under the autocast that it is of; outside of it, as accelerate leaves it
    with the model, those that were cast to a type that it leaves alone."""
    if not isinstance(output, LazyOutput):
        return None
    autocast = autocast_dtype(output.device.type)
    left = autocast is None and output.dtype in (torch.float32, torch.float64)
    return output.rows if left or autocast == output._source.autocast else None


def _refuse_lost(func: Any, *given: Any, **options: Any) -> None:
    """Raise where the gradient of an output is asked for after a loss of its rows, through which none comes to it."""
    for output in tree_leaves((given, options)):
        if isinstance(output, LazyOutput) and output._source.lost:
            name = output._source.promise.name
            raise RuntimeError(
                f"The gradient of an output of {name} was asked for after its loss, which was made some rows at a "
                "time: ask for it before (retain_grad, register_hook), or optimize with returns='all'."
            )


def _with_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(_ordinary, (args, kwargs))
    return func(*args, **kwargs)


def _numbers(value: Any) -> Any:
    return value.of(value._source.get()) if isinstance(value, LazyOutput) else value


def _ordinary(value: Any) -> Any:
    return value.made() if isinstance(value, LazyOutput) else value


def made_when_used(kind: type) -> bool:
    """Whether this is the type of outputs that are made when they are used; artifacts have one of their own."""
    return kind.__name__ == "LazyOutput" and hasattr(kind, "lazily_held")


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


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class _Then(torch.autograd.Function):
    """What a change makes of an output: a view of it where the layout is one, a copy otherwise, which is made of the
    output's ``numbers`` where its gradient takes these."""

    @staticmethod
    def forward(ctx: Any, output: LazyOutput, change: Change, layout: Tensor, numbers: bool = False) -> Tensor:
        ctx.change, ctx.of, ctx.output = change, (output.shape, output.dtype), output if numbers else None
        if numbers or layout._is_view():
            return LazyOutput(output._source, layout, (output, change))
        return LazyOutput(output._source.then(lambda whole: change(output.of(whole)), layout.shape, layout.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype = ctx.of
        with torch.enable_grad():
            if ctx.output is None:
                leaf = torch.empty(shape, dtype=dtype, device=grad.device, requires_grad=True)
            else:
                leaf = ctx.output.of(ctx.output._source.get()).detach().requires_grad_()
            changed = ctx.change(leaf)
        (found,) = torch.autograd.grad(changed, leaf, grad, create_graph=torch.is_grad_enabled())
        return found, None, None, None


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
_PLAIN_ARGUMENTS = (int, float, slice, type(...), torch.dtype, torch.Size)
_OF_ROWS = (
    *(*MOVES, Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten, Tensor.contiguous),
    *(Tensor.__getitem__, Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, *SCALED, *LOGARITHMS),
)
_GATHER = (Tensor.gather, torch.gather)
_SPLIT = (Tensor.split, torch.split)
_FEW = 4  # times as many rows the output has at least
_KNOWN: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((functional.cross_entropy, functional.nll_loss), _loss),
    Tensor.detach: _detached,
    **dict.fromkeys((Tensor.argmax, torch.argmax, Tensor.logsumexp, torch.logsumexp, *_GATHER), _of_each_row),
    **dict.fromkeys((Tensor.unbind, torch.unbind, *_SPLIT), _parts),
    **dict.fromkeys(_OF_ROWS, _in_rows),
    **dict.fromkeys((torch.autograd.grad, Tensor.retain_grad, Tensor.register_hook), _refuse_lost),
}
