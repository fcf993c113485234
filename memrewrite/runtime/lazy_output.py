"""An output that is made when it is first used: logits beside a loss, which few loops look at.

Until then it is its shape, type and device, and what it is made of: a value that the program has anyway, and weights.
Whatever asks for its numbers gets an ordinary tensor, with the gradient that the model's own output has.

This file needs torch only, because its text is also pasted into generated models.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import TensorWeakRef

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.segment import OWN, autocast_dtype

Types = tuple[tuple[torch.dtype | None, torch.dtype, torch.dtype], ...]


def lazy_output(
    module: nn.Module,
    make: Callable[..., Tensor],
    sizes: Sequence[int],
    types: Types,
    names: Sequence[str],
    *of: Tensor,
) -> Tensor:
    """``make(*of)``, which runs once the result is used; the first of them is a value, the others have ``names``.

    Of ``sizes``, -1 is that of the value's first dimension, -2 that of its second. ``types`` say what type the result
    is of under autocast to the first type, None for without, if the value is of the second. Where it is of none of
    these, in inference mode, which counts no writes, and where compilers look, the result is made at once.
    """
    value = of[0]
    counted = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
    autocast = autocast_dtype(value.device.type)
    found = [result for cast, given, result in types if (cast, given) == (autocast, value.dtype)] if counted else []
    if not found or any(tensor.is_inference() for tensor in of):
        return make(*of)
    shape = torch.Size(size if size >= 0 else value.shape[-1 - size] for size in sizes)
    promise = getattr(type(module), OWN).promise
    source = _Source(make, of, ("what it is made of", *names), shape, found[0], autocast, promise)
    result: Tensor = _Origin.apply(source, *of)  # type: ignore[no-untyped-call]
    return result


class _Source:
    """What makes an output until that is made: of tensors as they were then."""

    def __init__(
        self,
        make: Callable[..., Tensor],
        of: Sequence[Tensor],
        names: Sequence[str],
        shape: torch.Size,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        promise: Any,
    ) -> None:
        self.make, self.names, self.autocast, self.promise = make, names, autocast, promise
        self.shape, self.dtype = shape, dtype
        # These stay as they are where ``.data`` is set; products of what needs a gradient run by other kernels.
        self.of = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in of]
        self.versions = [tensor._version for tensor in of]
        self.samples = [_sample(tensor) for tensor in self.of[1:]]
        self.made: Tensor | None = None
        self.output: TensorWeakRef | None = None  # the one that was made by this first: it has the gradient

    def to(self, dtype: torch.dtype) -> "_Source":
        """The same for a cast of the output, which is a copy: writes to the output do not change it."""
        casting = copy.copy(self)
        casting.make, casting.dtype, casting.output = lambda *of: self.make(*of).to(dtype), dtype, None
        return casting

    @property
    def held(self) -> list[Tensor]:
        """The tensors that stay because of it."""
        return [*self.of, *self.samples] if self.made is None else [self.made]

    def get(self, told: bool = True) -> Tensor:
        """The output, which is made now if it is not there; ``told`` says that it is warned of."""
        if self.made is None:
            self._refuse_changed()
            if told:
                size = self.shape.numel() * self.dtype.itemsize
                self.promise.tell_of_output(tuple(self.shape), size, _levels())
            with torch.inference_mode(False), torch.no_grad(), in_autocast(self.of[0], self.autocast):
                self.made = self.make(*self.of)
            self.of, self.samples = [], []
        return self.made

    def _refuse_changed(self) -> None:
        samples = [self.of[0][:0], *self.samples]
        for name, tensor, version, sample in zip(self.names, self.of, self.versions, samples, strict=True):
            known = type(tensor) is Tensor and sample.numel()  # a fake one has no numbers
            if tensor._version != version or (known and not torch.equal(sample, _sample(tensor))):
                raise RuntimeError(
                    f"An output of {self.promise.name} was not made when it was returned, and cannot be made any more: "
                    f"{name} was written since. Read it before the optimizer's step, or optimize with returns='all'."
                )


def _sample(weight: Tensor) -> Tensor:
    """The bytes of some numbers of a weight: kernels of others, and writes to its ``.data``, count no version."""
    if not weight.is_contiguous() or not weight.numel() or weight.is_complex():
        return torch.empty(0, dtype=torch.uint8, device=weight.device)
    return weight.detach().view(-1)[:: -(-weight.numel() // _SAMPLED)].clone().view(torch.uint8)


_SAMPLED = 1024


def _levels() -> int:
    """Where, as ``warnings`` count from a function that the caller calls, neither this file nor PyTorch runs."""
    frame, count = sys._getframe(1), 2
    while frame.f_back is not None and (frame.f_globals is globals() or _of_torch(frame)):
        frame, count = frame.f_back, count + 1
    return count


def _of_torch(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


class LazyOutput(Tensor):
    """An output that is not there yet, and has no storage until then."""

    _source: _Source
    _tensor: Tensor | None

    @staticmethod
    def __new__(cls, source: _Source) -> "LazyOutput":
        """One that is made by ``source``."""
        kind = {"dtype": source.dtype, "device": source.held[0].device}
        self: LazyOutput = Tensor._make_wrapper_subclass(cls, source.shape, **kind)  # type: ignore
        self._source, self._tensor = source, None
        source.output = source.output or TensorWeakRef(self)
        return self

    @property
    def lazily_held(self) -> list[Tensor]:
        """The tensors that stay because of it."""
        return self._source.held

    def made(self, told: bool = True) -> Tensor:
        """The ordinary tensor in its place; ``told`` says that it is warned of."""
        if self._tensor is None:
            first = None if self._source.output is None else self._source.output()
            self._source.get(told)
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
                if first is not None and first is not self:  # of which this is the same without a gradient
                    self._tensor = first.made(told).detach()
                else:
                    self._tensor = _Use.apply(self) if self.requires_grad else self._source.get()  # type: ignore
        return self._tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_NO_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # traced, what follows would have no gradient
            return torch.compiler.disable(_with_numbers)(func, args, kwargs or {})
        return _with_numbers(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        first = args[0] if args else None
        if isinstance(first, LazyOutput) and first._source.made is None:
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return LazyOutput(first._source)
            if func is torch.ops.aten._to_copy.default and [*(kwargs or {})] == ["dtype"]:
                return LazyOutput(first._source.to(kwargs["dtype"]))
        args, kwargs = tree_map(_numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _with_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(_ordinary, (args, kwargs))
    return func(*args, **kwargs)


def _numbers(value: Any) -> Any:
    return value._source.get() if isinstance(value, LazyOutput) else value


def _ordinary(value: Any) -> Any:
    return value.made() if isinstance(value, LazyOutput) else value


def made_when_used(kind: type) -> bool:
    """Whether this is the type of outputs that are made when they are used; artifacts have one of their own."""
    return kind.__name__ == "LazyOutput" and hasattr(kind, "lazily_held")


class _Origin(torch.autograd.Function):
    """Gives an output that is not there yet, through which gradients go as if it had been made."""

    @staticmethod
    def forward(ctx: Any, source: _Source, *of: Tensor) -> Tensor:
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


class _Use(torch.autograd.Function):
    """The ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, output: LazyOutput) -> Tensor:
        made = output._source.get()
        used = made.new_empty(0).set_(made.untyped_storage(), made.storage_offset(), made.shape, made.stride())
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
