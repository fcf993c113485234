"""What a checkpoint segment needs while it runs. This text is also part of every generated artifact: torch only.

As in ``torch.utils.checkpoint``, forward keeps a token in place of each tensor that autograd would save, and the first
token backward asks for runs the segment again, as far as its last saved tensor. That one serves any function, at 150 to
200 us of CPU a call. Generated code needs less, and more: segments inside segments, weights whose casts are not cached,
and buffers that are updated once.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from memrewrite.runtime.compiled import is_compiled, run_compiled, stays

_OUTSTANDING: "weakref.WeakValueDictionary[int, Recomputation]" = vars(torch.autograd.graph).setdefault(
    "_memrewrite_outstanding", weakref.WeakValueDictionary()
)
"""Segments that backward has yet to run again: those of all copies of this text, which every artifact has one of."""
OWN = "_memrewrite_own"  # where the class of a drop-in keeps what that has to itself


def run_segment(
    segment: Callable[..., Any],
    module: torch.nn.Module,
    *live_ins: Any,
    random: bool,
    reads: tuple[str, ...] = (),
    frozen: tuple[str, ...] = (),
    cached: bool = False,
    within: Any = None,
) -> Any:
    """Run ``segment(module, recomputing, *live_ins)`` and keep only its live-ins for backward.

    ``random`` says that the segment draws random numbers, so that recomputation must see the same random state;
    ``reads`` names the parameters it reads, ``frozen`` those of them that needed no gradient when it was planned; where
    others do or do not, it keeps what the model itself would. ``cached`` lets autocast keep its casts of them until it
    ends.
    ``recomputing`` is false in the forward pass and true whenever backward runs the segment again, which is how buffers
    are updated exactly once; a segment inside another one gets what that one got as ``within``, and is a part of it as
    long as that one runs for the first time.
    Raises ``RuntimeError`` in backward when a parameter or live-in is another than in the forward pass, or was written
    since: autograd would notice only if it had kept it.
    """
    if not torch.is_grad_enabled():
        return segment(module, False, *live_ins)
    if within is not None and not (within and within.again):
        return segment(module, within, *live_ins)
    if is_compiled():  # AOTAutograd functionalizes buffer updates, so they happen once by themselves
        return run_compiled(functools.partial(segment, module, False), live_ins, random)
    parameters = _parameters(module, reads)
    if not any(isinstance(value, Tensor) and value.requires_grad for value in (*live_ins, *parameters)):
        return segment(module, within or False, *live_ins)  # nothing in it is kept for backward
    if changed := [n for n, p in zip(reads, parameters, strict=True) if p is not None and _thawed(p, n in frozen)]:
        getattr(type(module), OWN).tell_of_gradients(changed[0])
        return segment(module, within or False, *live_ins)
    return Recomputation(segment, module, live_ins, random, reads, frozen, parameters, cached, within).run()


def still_read() -> set[int]:
    """The ids of the parameters that segments are yet to read as they run again."""
    segments = [segment for ref in _OUTSTANDING.valuerefs() if (segment := ref()) is not None]
    return {id(parameter) for segment in segments for parameter in segment.parameters}


def _thawed(parameter: Tensor, frozen: bool) -> bool:
    """Whether it needs a gradient now if it did not when it was planned, or the other way round."""
    return parameter.requires_grad == frozen


def keep(recomputing: Any, number: int, random: bool, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``operator(*args, **kwargs)`` in a segment, never run again: what it gives and what only it saves stay.

    Of what it saves, the segment makes those tensors again that are among ``args``. ``number`` tells it from others in
    the segment; ``random`` says that it draws.
    """
    if isinstance(recomputing, Recomputation):
        return recomputing.keep(number, operator, args, kwargs, random)
    return stays(operator, _cast(operator, args), kwargs) if is_compiled() else operator(*args, **kwargs)


class _Token:
    """Stands for the ``index``-th tensor that a segment saved; the segment lives as long as its tokens."""

    __slots__ = ("__weakref__", "index", "segment")

    def __init__(self, segment: "Recomputation", index: int) -> None:
        self.segment, self.index = segment, index


class _Stop(Exception):  # noqa: N818  (nothing went wrong)
    """Everything that was saved is there again."""


class Recomputation:
    """One call of a segment, and the tensors it saved as long as backward has them made again.

    It is true where operators run again: while backward runs it again, or one that it lies in.
    """

    def __init__(
        self,
        segment: Callable[..., Any],
        module: torch.nn.Module,
        live_ins: tuple[Any, ...],
        random: bool,
        reads: tuple[str, ...],
        frozen: tuple[str, ...],
        parameters: list[Any],
        cached: bool,
        within: "Recomputation | None",
    ) -> None:
        self.segment, self.module, self.live_ins, self.cached, self.within = segment, module, live_ins, cached, within
        self.saved: list[tuple[weakref.ref[_Token], torch.Size, torch.dtype]] = []
        self.found: dict[int, Any] = {}  # index -> the tensor, or the token of a segment inside, and its version
        self.count = 0
        self.again = False
        self.kept: dict[int, Kept] = {}  # by the outermost segment
        self.keeping: Kept | None = None  # the one that runs
        self.reads, self.frozen = reads, frozen
        self.parameters = parameters
        self.versions = [_version(value) for value in (*self.parameters, *live_ins)]
        self.autocast = _autocast_state(live_ins)
        self.random = (torch.get_rng_state(), get_device_states(*live_ins)) if random else None

    def run(self) -> Any:
        """Run the segment for the first time."""
        _OUTSTANDING[id(self)] = self
        with saved_tensors_hooks(self._pack, _unpack):
            return self._call()

    def __bool__(self) -> bool:
        return self.again or self.within is not None

    def _pack(self, tensor: Tensor) -> Any:
        if self.keeping is not None and not self.keeping.gave(tensor):
            return tensor.detach()  # a node that held its own result would never be freed
        token = _Token(self, len(self.saved))
        self.saved.append((weakref.ref(token), tensor.shape, tensor.dtype))
        return token if self.within is None else self.within.collect(token, tensor)

    def collect(self, value: Any, tensor: Tensor) -> Any:
        """Take what is saved while the segment runs again; ``value`` stands for ``tensor``."""
        index = self.count
        self.count += 1
        token, shape, dtype = self.saved[index]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise RuntimeError(
                f"A segment saved a tensor of {dtype} {tuple(shape)} in the forward pass and one of {tensor.dtype} "
                f"{tuple(tensor.shape)} when backward ran it again: what it depends on has changed in between."
            )
        if token() is not None:
            self.found[index] = value, _version(value)
        if self.count == len(self.saved):
            raise _Stop
        return value

    def unpack(self, index: int) -> Tensor:
        """The tensor that was saved as the ``index``-th."""
        if index not in self.found:
            self._run_again()
        value, version = self.found.pop(index)
        if _version(value) != version:
            raise RuntimeError(
                "What a segment computed again, or a parameter that it read, was written in place before backward "
                f"computed with it (it is at version {_version(value)}; expected version {version})."
            )
        return _unpack(value)

    def _run_again(self) -> None:
        now = _parameters(self.module, self.reads)
        _refuse_changed(self.reads, self.parameters, self.versions, now, self.live_ins)
        self.count, self.again = 0, True
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():  # backward works there, but nothing that runs would be saved
                stack.enter_context(torch.inference_mode(False))
            if self.random is not None:
                stack.enter_context(_random_state(*self.random))
            if self.autocast != _autocast_state(self.live_ins):
                for kind, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype if enabled else None, enabled))
            for parameter, name in zip(now, self.reads, strict=True):
                if parameter is not None and _thawed(parameter, name in self.frozen):
                    stack.enter_context(_as_planned(parameter))
            with torch.enable_grad(), saved_tensors_hooks(self._collect_tensor, _unpack), contextlib.suppress(_Stop):
                self._call()
        if self.count != len(self.saved):
            raise RuntimeError(
                f"A segment saved {len(self.saved)} tensors in the forward pass and {self.count} when backward ran it "
                "again: what it depends on has changed in between."
            )
        _OUTSTANDING.pop(id(self), None)

    def _collect_tensor(self, tensor: Tensor) -> Any:
        return self.collect(tensor.detach(), tensor)

    def _call(self) -> Any:
        """Call the segment; autocast keeps no casts of its weights, which would stay until autocast ends."""
        if self.cached or not any(enabled for _, enabled, _ in self.autocast) or not torch.is_autocast_cache_enabled():
            return self.segment(self.module, self, *self.live_ins)
        torch.set_autocast_cache_enabled(False)
        try:
            return self.segment(self.module, self, *self.live_ins)
        finally:
            torch.set_autocast_cache_enabled(True)

    def keep(
        self,
        number: int,
        operator: Callable[..., Any],
        args: Any,
        kwargs: Any,
        random: bool,
        kind: "Callable[[tuple[Any, ...]], Kept] | None" = None,
    ) -> Any:
        """Run ``operator`` in the forward pass, and later give what it gave then, or what ``kind`` of it does."""
        args = _cast(operator, args)
        if not self:
            self.keeping = kept = self.kept[number] = (kind or Kept)(args)
            try:
                result = operator(*args, **kwargs)
            finally:
                self.keeping = None
            kept.take(result, (torch.get_rng_state(), get_device_states(*args)) if random else None)
            return result
        kept = self.outermost.kept[number]
        for position, place in kept.saved:
            self.save(args[position] if place is None else args[position].as_strided(*place))
        return kept.give(args)

    @property
    def outermost(self) -> "Recomputation":
        """The segment around all others that this one lies in."""
        return self if self.within is None else self.within.outermost

    def save(self, tensor: Tensor) -> None:
        """Take what autograd would save where operators run again."""
        _ = self._collect_tensor(tensor) if self.again else self._pack(tensor)


class Kept:
    """What an operator gave, which of its arguments or views of them it saved, and the random state it left."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args: tuple[Any, ...] = args
        self.saved: list[tuple[int, Any]] = []
        self.outputs: Any = None
        self.random: Any = None

    def gave(self, tensor: Tensor) -> bool:
        """Whether a tensor it saves is an argument or a view of one, which is noted then."""
        for position, value in enumerate(self.args):
            if isinstance(value, Tensor) and _in_one(value, tensor):
                place = None if _same(value, tensor) else (tensor.shape, tensor.stride(), tensor.storage_offset())
                self.saved.append((position, place))
                return True
        return False

    def take(self, result: Any, random: Any) -> None:
        """Keep the result of the operator and the random state after it."""
        self.args, self.random = (), random
        outputs = result if isinstance(result, tuple) else (result,)
        self.outputs = [(v.detach(), v._version, v.requires_grad) if isinstance(v, Tensor) else v for v in outputs]
        self.single = not isinstance(result, tuple)

    def give(self, args: tuple[Any, ...]) -> Any:
        """What the operator gives where it would run again, on ``args``."""
        if self.random is not None:
            torch.set_rng_state(self.random[0])
            set_device_states(*self.random[1])
        outputs = tuple(_again(*value) if isinstance(value, tuple) else value for value in self.outputs)
        return outputs[0] if self.single else outputs


# Autocast runs all of these in its own type. What the products save are their inputs, views of them or casts.
PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("linear", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
)
IN_AUTOCAST = (*PRODUCTS, torch.ops.aten.matmul.default, torch.ops.aten.scaled_dot_product_attention.default)


def _cast(operator: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` as autocast gives them to ``operator``, so that their casts run again where it is kept."""
    return tuple(map(as_autocast, args)) if operator in IN_AUTOCAST else args


def as_autocast(value: Any) -> Any:
    """``value`` as autocast, if it is on, gives it to what it runs in its own type."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
        return value
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to there; None where it is off, or there is none, which PyTorch 2.11 cannot ask compiled."""
    there = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    on = there and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def _in_one(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors see one storage as elements of one type."""
    return a.dtype == b.dtype and a.untyped_storage() is b.untyped_storage()


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors that do are the same part of it."""
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def _again(value: Tensor, version: int, trained: bool) -> Tensor:
    if value._version != version:
        raise RuntimeError(
            "What a segment keeps was written in place between the forward and the backward pass, which computes "
            f"with it (it is at version {value._version}; expected version {version})."
        )
    return value.detach().requires_grad_(trained)


@contextlib.contextmanager
def _random_state(state: Tensor, of_devices: tuple[list[int], list[Tensor]]) -> Any:
    devices, states = of_devices
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(state)
        set_device_states(devices, states)
        yield


@contextlib.contextmanager
def _as_planned(parameter: Tensor) -> Any:
    """Let it need a gradient, or none, as it did in the forward pass: it was frozen, or trained, since."""
    parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        parameter.requires_grad_(not parameter.requires_grad)


def _unpack(value: Any) -> Tensor:
    found: Tensor = value.segment.unpack(value.index) if isinstance(value, _Token) else value
    return found


def _autocast_state(values: tuple[Any, ...]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Whether autocast is on, and its type, on the CPU and on the device of the first tensor."""
    device = next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
    kinds = ("cpu",) if device == "cpu" else ("cpu", device)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _parameters(module: torch.nn.Module, names: tuple[str, ...]) -> list[Any]:
    """The parameters of these names, None for one that is no longer there (parametrized since, say)."""
    own = getattr(type(module), OWN, None)
    owners = {} if own is None else own.owners
    places = (owners.get(name) for name in names)
    return [None if place is None else place[0].get(place[1]) for place in places]


def _version(value: Any) -> int:
    """How often it was written in place, as autograd counts for what it keeps."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _refuse_changed(
    names: tuple[str, ...], before: list[Any], versions: list[int], now: list[Any], live_ins: tuple[Any, ...]
) -> None:
    for name, old, new in zip(names, before, now, strict=True):
        if new is not old:
            raise RuntimeError(
                f"{name} was replaced between the forward and the backward pass, which computes with it."
            )
    named = [*zip(names, now, strict=True), *(("A value that a segment starts from", value) for value in live_ins)]
    for (name, value), version in zip(named, versions, strict=True):
        if _version(value) != version:
            raise RuntimeError(
                f"{name} was written in place between the forward and the backward pass, which computes with it "
                f"(it is at version {_version(value)}; expected version {version})."
            )


def once(buffer: Tensor, recomputing: Any) -> Tensor:
    """The buffer an operator updates, or a scratch copy nobody reads when the operator runs again.

    Exact for every value, unlike running batch normalization again with momentum 0 (0 times infinity is not a number).
    """
    return torch.empty_like(buffer) if recomputing else buffer
