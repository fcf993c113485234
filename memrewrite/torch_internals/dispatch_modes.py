"""Dispatch modes that cost little, for steps of which every operator is looked at. Read in PyTorch 2.11 to 2.15.

PyTorch goes through its dispatcher from each mode to the next, and each time past Dynamo, which has no business there:
a ``Layer`` calls the one below it itself. A fake tensor mode remembers what it gave for which kinds of arguments, but
takes longer to look that up than most operators take on real tensors: ``Recall`` looks it up in a tenth of the time.
"""

import contextlib
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from memrewrite.torch_internals.results_kept import (
    Formed,
    Given,
    Number,
    Result,
    Results,
    formed_of,
    given_back,
    new_ones,
    results_of,
    told,
    views,
)
from memrewrite.torch_internals.sizes_passed_on import Sizes, form_of, passes_sizes_on
from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._subclasses._fake_tensor_utils import _CacheKeyState
    from torch._subclasses.fake_tensor import (
        FakeTensor,
        FakeTensorMode,
        _BypassDispatchCache,
        _DispatchCacheValidEntry,
        disable_fake_tensor_cache,
    )
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

require(
    "Tensor._make_subclass",
    "_C._DisableTorchDispatch",
    "_C._set_throw_on_mutable_data_ptr",
    "_C._set_warn_deprecated_on_mutable_data_ptr",
    "_subclasses.fake_tensor.FakeTensorMode._cache_key",
    "_subclasses.fake_tensor.FakeTensorMode._make_cache_entry",
    "ops.prim.device.default",
)

DEVICE = torch.ops.prim.device.default
# Operators that give something new, or the tensor they write, wherever tensors begin: some rows of many after others.
_PLACELESS = {"memrewrite::chain", "memrewrite::chain_slopes", "aten::mm", "aten::addmm_", "aten::copy_"}
_META = torch.device("meta")  # whose name takes as long to read as a tensor there takes to make
# Arguments that a call is known by as they are.
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def as_eager() -> contextlib.AbstractContextManager[None]:
    """Let what ``torch.compile`` made run as it was written.

    Under a mode Dynamo compiles nothing of such a function itself, but each function that the mode calls.
    """
    if "torch._dynamo.eval_frame" not in sys.modules or get_eval_frame_callback():
        return contextlib.nullcontext()  # nothing was compiled, or this is being compiled itself
    return torch.compiler.set_stance("force_eager")


class Layer(TorchDispatchMode):
    """A dispatch mode that runs an operator by ``below``, at once through the layer that it was opened on top of.

    That one is off the stack of modes meanwhile, and back when this one is closed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._under: Any = None  # a layer; called for every operator, which a cast would make dearer
        self._eager: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo is off while such a mode is on

    def __enter__(self) -> Self:
        top = _get_current_dispatch_mode()
        self._under = top if isinstance(top, Layer) else None
        if self._under is not None:
            TorchDispatchMode.__exit__(self._under, None, None, None)
        else:
            self._eager = as_eager()
            self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._under is not None:
            TorchDispatchMode.__enter__(self._under)
        else:
            self._eager.__exit__(None, None, None)
        self._under = None

    def below(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator as if this layer were not there."""
        under = self._under
        return func(*args, **kwargs) if under is None else under.__torch_dispatch__(func, types, args, kwargs)


class Recall(Layer):
    """Gives what the fake ``mode`` under it would take from its memory.

    A call is known by all that the mode tells apart: of a tensor its type, sizes, strides, device and whether it has a
    gradient, and where that may matter its place in its storage and the size of that; of all else type and value. What
    is out of the ordinary (symbolic sizes, complex numbers, constants) is left to the mode.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        if func.namespace == "profiler":  # whose ranges have no tensors
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        known = self._known(func, args, kwargs)
        if known is None:
            # The mode compares what it was given before, which objects of C++, as packed weights are, do not let it do.
            compared = not any(isinstance(value, torch.ScriptObject) for value in args)
            with contextlib.nullcontext() if compared else disable_fake_tensor_cache(self._mode):
                return func(*args, **kwargs)
        results = _RESULTS.get(known, _UNSEEN)
        if results is _UNSEEN:
            return func(*args, **kwargs) if func in _UNKEPT else self._learn(known, func, args, kwargs)
        return func(*args, **kwargs) if results is None else self._give(results, args)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor of the mode, made past the dispatcher."""
        made: Tensor = self._make(Result(dtype, tuple(size), tuple(stride), device, 0, None), ())
        return made

    def view(self, tensor: FakeTensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """Another view of a tensor's storage, made past the dispatcher."""
        result = Result(tensor.dtype, tuple(size), tuple(stride), tensor.fake_device, offset, 0)
        made: Tensor = self._make(result, (tensor,))
        return made

    def _give(self, results: Results, args: tuple[Any, ...]) -> Any:
        if results.kind is None:
            return self._make(results.each[0], args)
        return results.kind([self._make(result, args) for result in results.each])

    def _known(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """By what a call is known; None where something is out of the ordinary."""
        call: list[Any] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if func.namespace not in _BELOW_AUTOCAST:  # which may ask what autocast casts to
            call += [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        placed = _is_placed(func)
        ordinary = self._describe(args, call, placed) and (not kwargs or self._describe(kwargs.items(), call, placed))
        return tuple(call) if ordinary else None

    def _describe(self, values: Iterable[Any], call: list[Any], placed: bool) -> bool:
        """Add to ``call`` what tells these arguments apart; False where one is out of the ordinary.

        ``placed`` says that it matters where in its storage a tensor begins.
        """
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None or value.layout is not torch.strided:
                    return False
                if value.is_neg() or value.is_inference() or (dtype := value.dtype).is_complex:
                    return False
                call += (dtype, value.shape, value.stride(), value.requires_grad, value.fake_device)
                if placed:
                    call += (value.storage_offset(), value.untyped_storage().nbytes())
            elif kind in PLAIN:
                call += (kind, value)
            elif kind is list or kind is tuple or kind is torch.Size:
                call += (kind, len(value))
                if not self._describe(value, call, placed):
                    return False
            else:
                return False
        return True

    def _learn(self, known: tuple[Any, ...], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the operator, and keep what the mode would keep of it, unless what it gives is told without."""
        _LEARNED.add(func)
        found, sizes = told(func, args, kwargs), Sizes()
        form = form_of(known[1:3], func, args, kwargs, sizes) if found is None and passes_sizes_on(func) else None
        if form is not None and (alike := _FORMED.get(form)) is not None:
            found = alike.at(sizes.all)
        if found is not None:
            _RESULTS[known] = found
            return self._give(found, args)
        result, kept = _run_and_keep(self._mode, func, args, kwargs)
        if func in _VIEWS:
            _RESULTS[known] = views(result, args[0])
        elif func.namespace == _SHARDING:
            _RESULTS[known] = given_back(result, args) if self._known(func, args, kwargs) == known else None
        elif isinstance(result, list):  # of which the mode keeps nothing
            made = None if func._schema.is_mutable else new_ones(result, args)
            if made is None:
                _UNKEPT.add(func)
            else:
                _RESULTS[known] = made
        else:
            _RESULTS[known] = found = None if kept is None else results_of(kept)
            if form is not None and found is not None and (formed := formed_of(found, sizes)) is not None:
                _FORMED[form] = formed
        return result

    def _make(self, result: Given, args: tuple[Any, ...]) -> Any:
        if isinstance(result, Number):
            return result.value
        if not isinstance(result, Result):
            return None if result is None else args[result]
        with torch._C._DisableTorchDispatch():
            if result.view_of is None:
                whole = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=_META)
            else:
                whole = torch.empty_strided((0,), (1,), dtype=result.dtype, device=_META)
                whole.set_(args[result.view_of].untyped_storage(), result.offset, result.shape, result.stride)
            made = Tensor._make_subclass(
                FakeTensor, whole, False, dispatch_device=True, device_for_backend_keys=result.device
            )
        return as_fake(made, whole, self._mode, result.device, self._attributes)


@functools.cache
def _is_placed(func: Any) -> bool:
    """Whether it may matter to an operator where in its storage a tensor begins."""
    return func.name() not in _PLACELESS


def as_fake(
    made: Any,
    whole: Tensor,
    mode: FakeTensorMode,
    device: torch.device,
    attributes: dict[torch.device, dict[str, Any]],
) -> Any:
    """What was ``made`` of ``whole`` with all that a fake tensor of a ``mode`` has on a device.

    ``attributes`` are those of fake tensors of that mode by device: they are the same for all.
    """
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    if device not in attributes:
        attributes[device] = dict(vars(FakeTensor(mode, whole, device)))
    vars(made).update(attributes[device])
    return made


def _run_and_keep(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, _DispatchCacheValidEntry | None]:
    """What an operator gives on fake tensors of a mode, and what that would keep of it; None where nothing.

    The mode itself keeps nothing: the operators that its rules run inside, ten for some, would not come again.
    """
    state, key = _CacheKeyState(mode.shape_env), None
    with contextlib.suppress(_BypassDispatchCache):
        key = mode._cache_key(state, func, args, kwargs)
    enabled, mode.cache_enabled = mode.cache_enabled, False
    try:
        result = func(*args, **kwargs)
    finally:
        mode.cache_enabled = enabled
    if key is not None:
        with contextlib.suppress(_BypassDispatchCache):
            return result, mode._make_cache_entry(state, key, func, args, kwargs, result)
    return result, None


_UNSEEN = Results(None, ())
_RESULTS: dict[tuple[Any, ...], Results | None] = {}  # None for calls that are to be left to the mode
_FORMED: dict[Any, Formed] = {}  # by what tells of calls but their sizes
_LEARNED: set[Any] = set()  # the operators in there, so that no other one gets their ids, which are found sooner
_UNKEPT: set[Any] = set()  # operators that nothing is kept of
_BELOW_AUTOCAST = {"aten", "prims", "prim"}
_SHARDING = "fsdp"  # the operators that units copy by; the mode keeps nothing of operators that are not PyTorch's core

# What these give are views of their first argument, of which the mode keeps nothing either.
_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default}
_VIEWS |= {torch.ops.aten.unbind.int}
