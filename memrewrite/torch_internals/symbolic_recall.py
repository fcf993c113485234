"""What fakes give while a graph is traced with sizes that vary, remembered. Read in PyTorch 2.11 to 2.15.

Such a mode remembers what it gave itself, but to look that up, and to make a tensor of it, takes it longer than all
else that is done for a node; and it keeps nothing of the reshaped results that every linear layer has.
``SymbolicRecall`` looks it up sooner, as ``Recall`` does for sizes that are numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memrewrite.torch_internals.dispatch_modes import PLAIN, Layer, as_fake
from memrewrite.torch_internals.size_arithmetic import another, replaced
from memrewrite.torch_internals.sizes_passed_on import Form, Sizes, form_of, passes_sizes_on
from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    from torch._subclasses._fake_tensor_utils import _CacheKeyState
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache, _DispatchCacheValidEntry
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

require(
    "Tensor._make_subclass",
    "_C._DisableTorchDispatch",
    "_subclasses.fake_tensor.FakeTensorMode._cache_key",
)

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # which is a view, and nothing is kept of it


class SymbolicRecall(Layer):
    """Gives what the fake mode that a graph is traced with would give for a call that it was given before.

    A call is known by all that the mode tells apart: of a tensor its type, sizes, strides and place in its storage as
    expressions, the size of that, its device and whether it has a gradient; of all else type and value. Which sizes are
    one object counts, too: the tracer knows by that which node gave them, and so it is one of those that the call was
    given, or a new one, as the mode has it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._mode: Any = None  # that of the tensors, once one was seen
        self._results: dict[Any, _Results | None] = {}  # None for calls that are to be left to the mode
        self._formed: dict[Any, _Formed] = {}  # by what tells of calls but their sizes
        self._pinned: list[Any] = []  # what ids are of
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or getattr(func, "namespace", "") != "aten" or get_proxy_mode() is not None:
            return func(*args, **kwargs)
        nodes: list[Any] = []
        key = self._known(func, args, kwargs, nodes)
        if key is None:
            return func(*args, **kwargs)
        results = self._results.get(key, _UNSEEN)
        if results is _UNSEEN:
            return self._learn(key, func, args, kwargs, nodes)
        return func(*args, **kwargs) if results is None else self._give(results, args, nodes)

    def _give(self, results: "_Results", args: tuple[Any, ...], nodes: list[Any]) -> Any:
        made = [self._make(each, args, nodes) for each in results.each]
        return tuple(made) if results.several else made[0]

    def _known(self, func: Any, args: Any, kwargs: Mapping[str, Any], nodes: list[Any]) -> tuple[Any, ...] | None:
        """By what a call is known, where ``nodes`` get its sizes that vary; None where something is unusual."""
        call: list[Any] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._describe(args, call, nodes) or (kwargs and not self._describe(kwargs.items(), call, nodes)):
            return None
        return None if self._mode is None else (*call, self._mode.epoch, replaced(self._mode.shape_env))

    def _describe(self, values: Iterable[Any], call: list[Any], nodes: list[Any]) -> bool:
        """Add to ``call`` what tells these arguments apart; False where one is out of the ordinary."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_usual(value):
                    return False
                place = value.storage_offset(), value.untyped_storage().nbytes()
                call += (FakeTensor, value.dtype, value.dim(), value.requires_grad, value.fake_device)
                self._sizes(value.shape, call, nodes)
                self._sizes(value.stride(), call, nodes)
                self._sizes(place, call, nodes)
            elif kind in PLAIN:
                call += (kind, value)
            elif kind is torch.SymInt:
                self._sizes((value,), call, nodes)
            elif kind is list or kind is tuple or kind is torch.Size:
                call += (kind, len(value))
                if not self._describe(value, call, nodes):
                    return False
            else:
                return False
        return True

    def _is_usual(self, value: Any) -> bool:
        if value.fake_mode is not self._mode:
            if self._mode is not None or value.fake_mode.shape_env is None:
                return False
            self._mode = value.fake_mode
        strided = value.constant is None and value.layout is torch.strided
        return strided and not (value.is_neg() or value.is_inference() or value.dtype.is_complex)

    def _sizes(self, sizes: Iterable[Any], call: list[Any], nodes: list[Any]) -> None:
        for size in sizes:
            if type(size) is int:
                call.append(size)
                continue
            node = size.node
            place = next((i for i, other in enumerate(nodes) if other is node), len(nodes))
            if place == len(nodes):
                nodes.append(node)
                call += (torch.SymInt, id(node._expr))
            else:
                call += (_Again, place)

    def _learn(self, key: Any, func: Any, args: Any, kwargs: Mapping[str, Any], nodes: list[Any]) -> Any:
        """Run the operator, and keep what the mode has kept of it; told by other sizes, it need not run.

        Unlike in ``Recall``, that keeps what it runs inside, too: names of nodes tell which sizes were asked for.
        """
        self._pinned += (func, [node._expr for node in nodes])
        mode, state, sizes = self._mode, _CacheKeyState(self._mode.shape_env), _OpenSizes(nodes)
        form = form_of((*key[1:3], *key[-2:]), func, args, kwargs, sizes) if passes_sizes_on(func) else None
        form = form and (form, sizes.varying)
        if form in self._formed:
            told = self._formed[form].at(sizes)
            self._results[key] = told
            return self._give(told, args, nodes)
        try:
            theirs = mode._cache_key(state, func, args, kwargs)
        except _BypassDispatchCache:
            theirs = None
        result = func(*args, **kwargs)
        cache = mode.shape_env.fake_tensor_cache if state.cache_on_shape_env() else FakeTensorMode.cache
        kept = None if theirs is None else cache.get(theirs)
        self._results[key] = None
        if func is _UNSAFE_VIEW:
            self._results[key] = _of_view(result, args, nodes)
        elif isinstance(kept, _DispatchCacheValidEntry):
            self._results[key] = found = _of_entry(kept, result, nodes)
            assumes = bool(mode.shape_env.guards)  # of these sizes, perhaps
            if form is not None and found is not None and not assumes and (formed := _formed(found, sizes)) is not None:
                self._formed[form] = formed
        return result

    def _make(self, result: "_Given", args: tuple[Any, ...], nodes: list[Any]) -> Any:
        if not isinstance(result, _Result):
            return None if result is None else args[result]
        there = (*nodes, *map(another, result.own))
        shape, stride, offset = (
            [torch.SymInt(there[size.number]) if isinstance(size, _Varying) else size for size in sizes]
            for sizes in (result.shape, result.stride, result.offset)
        )
        with torch._C._DisableTorchDispatch(), self._mode.shape_env.suppress_guards():
            if result.view_of is None:
                whole = torch.empty_strided(shape, stride, dtype=result.dtype, device="meta")
            else:
                whole = torch.empty(0, dtype=result.dtype, device="meta")
                whole.set_(args[result.view_of].untyped_storage(), offset[0], shape, stride)
            made = Tensor._make_subclass(
                FakeTensor, whole, False, dispatch_device=True, device_for_backend_keys=result.device
            )
        return as_fake(made, whole, self._mode, result.device, self._attributes)


class _Again:
    """Stands in what a call is known by for a size that is the same object as one before."""


@dataclass(frozen=True, slots=True)
class _Varying:
    """A size that varies: which of those that the call was given, or, after them, of the result's own."""

    number: int


_Size = int | _Varying


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor to make, with a storage of its own or with that of the argument numbered ``view_of``."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[_Size, ...]
    stride: tuple[_Size, ...]
    offset: tuple[_Size]
    own: tuple[Any, ...]
    view_of: int | None


_Given = _Result | int | None  # an int is the number of an argument that is given back


@dataclass(frozen=True, slots=True)
class _Results:
    """What a call gives, in a tuple where it gives ``several``."""

    several: bool
    each: tuple[_Given, ...]


_UNSEEN = _Results(False, ())
_OPEN = 2**40  # such a number and those above stand for sizes that vary, by the numbers of these


class _OpenSizes(Sizes):
    """Those of a call of which some vary, but no stride does."""

    def __init__(self, nodes: list[Any]) -> None:
        super().__init__()
        self._nodes = nodes
        self._expressions: list[int] = []

    @property
    def varying(self) -> tuple[Any, ...]:
        """Which of them vary, and by which expressions."""
        return (*(size >= _OPEN for size in self.all), *self._expressions)

    def form(self, shape: Iterable[Any], stride: Sequence[Any]) -> Form | None:
        """The form of an argument; None where its elements share memory, or a stride varies."""
        if any(type(step) is not int for step in stride):
            return None
        return super().form([size if type(size) is int else self._open(size.node) for size in shape], stride)

    def _open(self, node: Any) -> int:
        self._expressions.append(id(node._expr))
        return _OPEN + next(i for i, other in enumerate(self._nodes) if other is node)


@dataclass(frozen=True, slots=True)
class _Formed:
    """What calls give that differ in sizes that do not vary, each result with its form."""

    several: bool
    each: tuple[tuple[_Result, Form], ...]

    def at(self, sizes: Sizes) -> _Results:
        """What one with these sizes gives."""
        return _Results(self.several, tuple(_at(result, form, sizes.all) for result, form in self.each))


def _at(result: _Result, form: Form, sizes: Sequence[int]) -> _Result:
    shape, stride = form.at(sizes)
    return replace(result, shape=tuple(_Varying(s - _OPEN) if s >= _OPEN else s for s in shape), stride=stride)


def _formed(results: _Results, sizes: _OpenSizes) -> _Formed | None:
    """What calls of other sizes give; None where these do not tell that."""
    each: list[tuple[_Result, Form]] = []
    for result in results.each:
        if not isinstance(result, _Result) or result.view_of is not None or result.offset != (0,) or result.own:
            return None
        shape = [_OPEN + size.number if isinstance(size, _Varying) else size for size in result.shape]
        stride = [step for step in result.stride if isinstance(step, int)]
        form = sizes.form_of_result(shape, stride) if len(stride) == len(shape) else None
        if form is None:
            return None
        each.append((result, form))
    return _Formed(results.several, tuple(each))


def _result(tensor: Any, view_of: int | None, nodes: list[Any], as_it_is: bool = False) -> _Result | None:
    """How to make such a tensor where the call was given sizes of these nodes; None for an unusual one.

    Sizes of its own are one object each; if it is kept ``as_it_is``, those that are one are one.
    """
    if type(tensor) is not FakeTensor or tensor.requires_grad or tensor.is_neg() or tensor.dtype.is_complex:
        return None
    own: list[Any] = []

    def sized(size: Any) -> _Size:
        if type(size) is int:
            return size
        known = (*nodes, *own) if as_it_is else nodes
        found = next((i for i, node in enumerate(known) if node is size.node), None)
        if found is None:
            own.append(size.node)
            return _Varying(len(nodes) + len(own) - 1)
        return _Varying(found)

    shape, stride = tuple(map(sized, tensor.shape)), tuple(map(sized, tensor.stride()))
    offset = (sized(tensor.storage_offset()),)
    return _Result(tensor.dtype, tensor.fake_device, shape, stride, offset, tuple(own), view_of)


def _of_view(result: Any, args: tuple[Any, ...], nodes: list[Any]) -> _Results | None:
    made = _result(result, 0, nodes, as_it_is=True)
    shared = made is not None and result.untyped_storage() is args[0].untyped_storage()
    return _Results(False, (made,)) if shared else None


def _of_entry(kept: _DispatchCacheValidEntry, result: Any, nodes: list[Any]) -> _Results | None:
    found: list[_Given] = []
    tensors = result if kept.is_output_tuple else (result,)
    for info, tensor in zip(kept.output_infos, tensors, strict=True):
        if info.metadata is not None:
            made = _result(tensor, info.view_idx, nodes)
            if made is None:
                return None
            found.append(made)
        elif info.inplace_idx is None and info.constant_value is not None:
            return None
        else:
            found.append(info.inplace_idx)
    return _Results(kept.is_output_tuple, tuple(found))
