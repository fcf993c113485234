"""What is kept of an operator's results on fake tensors: all that it takes to make such ones again.

Of some that is known before they run: slices of tensors, of which backward of a concatenation takes hundreds, lie where
their arguments tell, and updates of many tensors in place give nothing. Read in PyTorch 2.11 to 2.15.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.torch_internals.sizes_passed_on import Form, Sizes
from memrewrite.torch_internals.versions import private_imports

with private_imports():
    from torch._subclasses.fake_tensor import FakeTensor, _DispatchCacheValidEntry


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor to make, with a storage of its own or with that of the argument numbered ``view_of``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    offset: int
    view_of: int | None


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is given beside tensors, as attention gives how long texts are."""

    value: int


Given = Result | Number | int | None  # an int is the number of an argument that is given back


@dataclass(frozen=True, slots=True)
class Results:
    """What a call gives; one of them where ``kind`` is None."""

    kind: type[list[Any]] | type[tuple[Any, ...]] | None
    each: tuple[Given, ...]


@dataclass(frozen=True, slots=True)
class Formed:
    """What calls give that differ in sizes: each with its form, None for what is no new tensor."""

    kind: type[list[Any]] | type[tuple[Any, ...]] | None
    each: tuple[tuple[Given, Form | None], ...]

    def at(self, sizes: Sequence[int]) -> Results:
        """What one with these sizes gives."""
        return Results(self.kind, tuple(_at(given, form, sizes) for given, form in self.each))


def _at(given: Given, form: Form | None, sizes: Sequence[int]) -> Given:
    if form is None or not isinstance(given, Result):
        return given
    shape, stride = form.at(sizes)
    return replace(given, shape=shape, stride=stride)


_SLICE, _DETACH = torch.ops.aten.slice.Tensor, torch.ops.aten.detach.default


def results_of(kept: _DispatchCacheValidEntry) -> Results | None:
    """What a call gives by what the mode keeps of it; None where that is out of the ordinary."""
    found: list[Given] = []
    for info in kept.output_infos:
        made: Any = info.metadata
        if made is not None and (made.requires_grad or made.is_quantized or made.is_conj or made.is_neg):
            return None
        if made is None and info.inplace_idx is None and info.constant_value is not None:
            if type(info.constant_value) is not int:
                return None  # it varies
            found.append(Number(info.constant_value))
        elif made is None:
            found.append(info.inplace_idx)
        else:
            found.append(Result(made.dtype, made.shape, made.stride, made.device, made.storage_offset, info.view_idx))
    return Results(tuple if kept.is_output_tuple else None, tuple(found))


def formed_of(results: Results, sizes: Sizes) -> Formed | None:
    """What calls of other sizes give; None where that is not told by these."""
    each: list[tuple[Given, Form | None]] = []
    for given in results.each:
        form = None
        if isinstance(given, Number):
            return None
        if isinstance(given, Result):
            own = given.view_of is None and not given.offset
            form = sizes.form_of_result(given.shape, given.stride) if own else None
            if form is None:
                return None
        each.append((given, form))
    return Formed(results.kind, tuple(each))


def new_ones(result: list[Any], args: tuple[Any, ...]) -> Results | None:
    """Tensors that fill a storage of their own each; None where one does not."""
    storages = {id(each.untyped_storage()) for each in tensors_in(args)}
    for tensor in result:
        if type(tensor) is not FakeTensor or tensor.requires_grad or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        whole = tensor.storage_offset() == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
        if not whole or id(storage) in storages or tensor.dtype.is_complex:
            return None
        storages.add(id(storage))
    return Results(list, tuple(Result(t.dtype, tuple(t.shape), t.stride(), t.fake_device, 0, None) for t in result))


def views(result: Any, source: Tensor) -> Results | None:
    """Views of one tensor; None where one is anything else."""
    storage = source.untyped_storage()
    kind, views = (list, result) if isinstance(result, list) else (None, [result])
    if any(view.untyped_storage() is not storage or view.requires_grad for view in views):
        return None
    made = (Result(v.dtype, tuple(v.shape), v.stride(), v.fake_device, v.storage_offset(), 0) for v in views)
    return Results(kind, tuple(made))


def given_back(result: Any, args: tuple[Any, ...]) -> Results | None:
    """What is nothing, or arguments and views of them; None where a tensor is anything else."""
    if result is None:
        return Results(None, (None,))
    places = {id(arg.untyped_storage()): i for i, arg in enumerate(args) if isinstance(arg, Tensor)}
    found: list[Result | int | None] = []
    for each in result:
        number = next((i for i, arg in enumerate(args) if arg is each), None)
        place = places.get(id(each.untyped_storage())) if number is None else number
        if place is None or each.requires_grad:
            return None
        made = Result(each.dtype, tuple(each.shape), each.stride(), each.device, each.storage_offset(), place)
        found.append(made if number is None else number)
    return Results(tuple, tuple(found))


def told(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Results | None:
    """What an operator gives, where that need not be looked at; None where it has to run."""
    if func is _DETACH:
        return _view(args[0], args[0].shape, args[0].stride(), 0)
    if func is _SLICE and not kwargs:
        return _part(*args)
    return Results(None, (None,)) if _only_updates(func, args, kwargs) else None


def _part(
    of: FakeTensor, dim: int = 0, begin: int | None = None, end: int | None = None, step: int = 1
) -> Results | None:
    """A slice of a tensor; None where there is none."""
    shape, stride = [*of.shape], [*of.stride()]
    if step < 1 or not -len(shape) <= dim < len(shape):
        return None
    start, stop, _ = slice(begin, end, step).indices(shape[dim])
    ahead = start * stride[dim]
    shape[dim], stride[dim] = len(range(start, stop, step)), stride[dim] * step
    return _view(of, shape, stride, ahead)


def _view(of: FakeTensor, shape: Sequence[int], stride: Sequence[int], ahead: int) -> Results:
    """A view that begins so many elements further ``ahead``."""
    view = Result(of.dtype, tuple(shape), tuple(stride), of.fake_device, int(of.storage_offset()) + ahead, 0)
    return Results(None, (view,))


def _only_updates(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator updates each of a list of tensors by others like it and by numbers, and gives nothing."""
    schema = func._schema
    if not schema.name.startswith("aten::_foreach_") or schema.returns or kwargs:
        return False
    lists = [arg for arg in args if isinstance(arg, list)]
    plain = all(isinstance(arg, int | float | list) for arg in args)
    return plain and len({len(each) for each in lists}) == 1 and all(map(_alike, zip(*lists, strict=True)))


def _alike(each: tuple[Any, ...]) -> bool:
    """Whether the tensors among these are alike, and the others numbers."""
    kinds = {(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in each}
    return len(kinds - {int, float}) == 1
