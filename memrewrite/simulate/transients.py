"""What operators take on the device while they run, beyond their results: convolution workspaces, buffers of split
reductions, accumulators of attention backward.

Fake tensors do not show it and it depends on the device and on library versions, so each operator is run once per
signature on the device, on tensors of ones and zeros, and the allocator's peak is read.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memrewrite.private import FakeTensor, OpOverload

Measure = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], int]


@dataclass(frozen=True)
class _Like:
    """The signature of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        """A real tensor like it: ones, and zeros for integers, which are in range wherever they index something."""
        spans = [(size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)]
        extent = 0 if 0 in self.shape else 1 + sum(spans)
        value = 1 if self.dtype.is_floating_point else 0
        whole = torch.full((extent,), value, dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride)


class Transients:
    """Bytes by operator and signature. ``lookup`` finds them and remembers what it does not know for ``probe``."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._known: dict[Any, int] = {}
        self._unknown: dict[Any, tuple[OpOverload, Any, Any]] = {}

    def lookup(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes that this call takes beyond its results while it runs; 0 as long as that is not known."""
        if not isinstance(func, OpOverload) or func.namespace != "aten" or func.__name__.startswith("_foreach"):
            return 0  # foreach operators work tensor by tensor and would each be a signature of its own
        call = (func, like(args), like(tuple(kwargs.items())))
        try:
            known = self._known.get(call)
        except TypeError:  # an argument that cannot be part of a signature
            return 0
        if known is None:
            self._unknown[call] = call
        return known or 0

    def probe(self) -> bool:
        """Measure what ``lookup`` was asked and did not know; returns whether any of it takes something."""
        learned = {key: self._measure(func, args, dict(kwargs)) for key, (func, args, kwargs) in self._unknown.items()}
        self._known.update(learned)
        self._unknown.clear()
        return any(learned.values())


@functools.cache
def transients_on(device: torch.device) -> Transients | None:
    """The table of ``device``, filled as simulations ask; None on devices other than CUDA."""
    return Transients(functools.partial(_measured, device)) if device.type == "cuda" else None


def like(value: Any) -> Any:
    """An argument with every tensor in it as a signature, lists as tuples."""
    if isinstance(value, Tensor):
        device = value.fake_device if isinstance(value, FakeTensor) else value.device
        return _Like(tuple(value.shape), value.stride(), value.dtype, device)
    return tuple(like(item) for item in value) if isinstance(value, list | tuple) else value


def made(value: Any) -> Any:
    """An argument again, of what ``like`` made of it; tuples come as lists."""
    if isinstance(value, _Like):
        return value.make()
    return [made(item) for item in value] if isinstance(value, tuple) else value


def _measured(device: torch.device, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Run the operator twice (libraries set themselves up in the first run) and read the peak of the second."""
    if not any(isinstance(arg, _Like) and arg.device.type == "cuda" for arg in _leaves(args)):
        return 0
    args = random_state_on_host(func, args)
    try:
        with torch.no_grad():
            for _ in range(2):
                given, named = [made(arg) for arg in args], {name: made(value) for name, value in kwargs.items()}
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                result = func(*given, **named)
                after = torch.cuda.memory_allocated(device)
                extra = torch.cuda.max_memory_allocated(device) - max(before, after)
                del given, named, result
    except RuntimeError:
        return 0  # it does not run on such values, or there is no room for it alone: nothing is known
    return extra


def random_state_on_host(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as the kernel reads them: fake tensors have the seed and offset of dropout on the device.

    Backward of memory-efficient attention takes them by a host pointer, so that the process would die of others
    (PyTorch, ``attention_backward.cu``, Note [Seed and Offset Device]). Flash attention has its own on the device.
    """
    if "efficient_attention" not in func.__name__:
        return args
    names = (argument.name for argument in func._schema.arguments)
    return tuple(
        replace(arg, device=torch.device("cpu")) if name.startswith("philox") and isinstance(arg, _Like) else arg
        for name, arg in zip(names, args, strict=False)
    )


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, tuple) else [value]
