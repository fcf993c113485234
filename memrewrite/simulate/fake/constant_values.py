"""The values of tensors that no input decides, known while a model runs on fake tensors.

Models ask such values what to do: transformers makes positions with ``arange`` and leaves a mask out if nothing but
consecutive positions is in them. A fake tensor has no answer, and code that sees one does something else. Here small
integer and boolean tensors that are made of nothing but numbers keep their values beside the fake ones. Whatever holds
parameters or buffers stays unknown, and so do inputs, unless a run is about these very inputs.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.fake_tensors import FakeTensor, in_place_of_modes, known_as_real
from memrewrite.torch_internals.operators import OpOverload, is_mutable, named_arguments, schema_name, written_arguments
from memrewrite.torch_internals.pytrees import tree_iter, tree_map

LIMIT = 2**20  # elements, at most 8 MiB; what is larger is not what a model asks
_FACTORIES = {"arange", "eye", "tril_indices", "triu_indices"}
# Each gives one number everywhere, whatever the values of the tensor it may be given: a number, or an argument's name.
_FILLS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1, "scalar_tensor": "s"}
_FILLS |= {"full": "fill_value", "new_full": "fill_value", "full_like": "fill_value"}
_LIFTS = {"lift_fresh", "lift_fresh_copy"}  # what torch.tensor(...) becomes
_RESHAPING = {"resize_", "resize_as_", "set_"}  # what they write may be another storage
_PLACE = {"device": torch.device("cpu"), "pin_memory": None, "non_blocking": False}  # where values are computed
_WHOLE = (0, 2**63 - 1, 1)  # the slice that is everything

# What holds for a row holds for any number of equal rows: of operators along other dimensions, and of these along any.
_ALONG = {"cat", "cumsum", "select", "slice"}
_ANYWHERE = {"alias", "all", "any", "clone", "detach", "permute", "transpose", "unsqueeze", "_to_copy"}


@contextmanager
def known_values(given: Iterable[tuple[Tensor, Tensor]] = ()) -> Iterator["KnownValues"]:
    """Know values while a fake mode, which must be on, runs a model; to others a known tensor seems a real one.

    ``given`` are fake tensors and the real ones they stand for, if the run is about these alone.
    """
    mode = KnownValues()
    for fake, real in given:
        mode.copy(fake, real)
    with known_as_real(mode.seems_real), mode:
        yield mode


class KnownValues(Layer):
    """While it is active, values are computed beside fake tensors where all they are made of is known.

    A dimension of symbolic size has size 1 in a value, which then stands for any number of equal rows. What a tensor
    with a known value is asked (``item``, ``bool``) is answered; all other operators are left to the fake mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()
        self.asked = False  # whether code outside PyTorch has asked for values that are not known

    def knows(self, tensor: object) -> bool:
        """Whether the value of ``tensor`` is known."""
        return isinstance(tensor, Tensor) and self.value(tensor) is not None

    def seems_real(self, tensor: object) -> bool:
        """What ``knows`` says, to code outside PyTorch; ``asked`` notes that it had to be told no."""
        known = self.knows(tensor)
        self.asked |= not known
        return known

    def value(self, tensor: Tensor) -> Tensor | None:
        """The value of ``tensor``, on the CPU; None where it is not known."""
        value, storage = self._values.get(tensor, (None, None))
        if value is None or StorageWeakRef(tensor.untyped_storage()) != storage or not _fits(value, tensor):
            return None  # what it was set to through .data, perhaps, is another tensor's
        known: Tensor = value
        return known

    def keep(self, fake: Tensor, value: Tensor) -> None:
        """Take ``value`` for that of ``fake`` from now on."""
        if type(value) is Tensor and fake.layout is torch.strided and _small(value) and _fits(value, fake):
            self._values[fake] = (value, StorageWeakRef(fake.untyped_storage()))

    def copy(self, fake: Tensor, real: Tensor) -> None:
        """Take what ``real`` holds now for the value of ``fake``."""
        if type(real) is Tensor and real.layout is torch.strided and _small(real):
            with in_place_of_modes():
                self.keep(fake, real.detach().cpu().clone())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kind = _kind(func)
        if kind == "body":
            result = self.below(func, types, args, kwargs)
            self._forget(_tensors((args, kwargs)))  # it may have written them
            return result
        if kind == "question" and not any(map(_symbolic, _tensors((args, kwargs)))):
            answer = self._compute(func, args, kwargs)
            if isinstance(answer, int | float):
                return answer
        if kind != "write":
            result = self.below(func, types, args, kwargs)
            if kind == "function" and any(map(_is_small_fake, _results(result))):
                self._follow(func, args, kwargs, result)
            return result
        written = _written(func, args, kwargs)
        try:
            result = self.below(func, types, args, kwargs)
        except BaseException:
            self._forget(written)
            raise
        self._write(func, args, kwargs, written)
        return result

    def _write(self, func: OpOverload, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        if not any(tensor in self._values for tensor in written):
            return
        tensors = _tensors((args, kwargs))
        sure = schema_name(func).partition("::")[2] not in _RESHAPING and not any(map(_symbolic, tensors))
        # Where the shape of a tensor itself has just changed, its value has not followed yet.
        if not sure or torch.Tag.inplace_view in func.tags or self._compute(func, args, kwargs) is None:
            self._forget(written)

    def _follow(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Keep the values of what a function gave, where they are known."""
        name = schema_name(func).removeprefix("aten::")
        if name in _FILLS:
            number: Any = _FILLS[name]
            number = named_arguments(func, args, kwargs)[number] if isinstance(number, str) else number
            if isinstance(number, int | float) and isinstance(result, Tensor):
                with in_place_of_modes():
                    self.keep(result, torch.full(_rows(result.shape), number, dtype=result.dtype))
            return
        if name in _LIFTS:
            self.copy(result, args[0])
            return
        tensors = _tensors((args, kwargs))
        if (not tensors and name not in _FACTORIES) or not all(map(self.knows, tensors)):
            return
        if any(map(_symbolic, (*tensors, *_results(result)))) or _has_symbols((args, kwargs)):
            args = self._of_rows(func, name, args, kwargs)
        values = None if args is None else self._compute(func, args, kwargs)
        for fake, value in zip(_results(result), _results(values), strict=False):
            # Else a write would reach only one of the two, or both where it should reach one.
            if all(_share(fake, t) == _share(value, self.value(t)) for t in tensors):
                self.keep(fake, value)

    def _of_rows(self, func: OpOverload, name: str, args: Any, kwargs: Any) -> Any:
        """The arguments that give the values of equal rows, None where those do not follow from one row."""
        if name == "expand":
            return (args[0], _rows(args[1]))
        if _has_symbols((args, kwargs)):
            return None
        if name in _ANYWHERE or torch.Tag.pointwise in func.tags:
            return args
        given = named_arguments(func, args, kwargs)
        if name == "slice" and (given["start"] or 0, given["end"] or _WHOLE[1], given["step"]) == _WHOLE:
            return args
        along = given.get("dim")
        tensors = _tensors((args, kwargs))
        fixed = isinstance(along, int) and not any(isinstance(t.shape[along], torch.SymInt) for t in tensors)
        return args if name in _ALONG and fixed else None

    def _compute(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What the operator gives for the values, on which it does what it does; None where that is not known."""
        if torch.Tag.nondeterministic_seeded in func.tags or not all(map(self.knows, _tensors((args, kwargs)))):
            return None
        values = tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        there = {name: _PLACE.get(name, value) if value is not None else None for name, value in values[1].items()}
        with suppress(Exception), in_place_of_modes():  # what cannot be computed is not known
            return func(*values[0], **there)
        return None

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Know no more what ``tensors`` hold, nor what others hold that share their memory."""
        values = [self._values[tensor][0] for tensor in tensors if tensor in self._values]
        places = {value.untyped_storage().data_ptr() for value in values}
        for tensor, (value, _) in list(self._values.items()):
            if value.untyped_storage().data_ptr() in places:
                del self._values[tensor]


@functools.cache
def _kind(func: Any) -> str:
    """What to do about an operator."""
    if not isinstance(func, OpOverload):
        return "body"
    if is_mutable(func):
        return "write"
    if torch.Tag.data_dependent_output in func.tags:
        return "question"
    own = func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
    return "function" if own and "empty" not in schema_name(func) else "other"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def _results(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []


def _written(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    return _tensors(written_arguments(func, args, kwargs))


def _share(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and StorageWeakRef(one.untyped_storage()) == StorageWeakRef(other.untyped_storage())


def _small(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= LIMIT


def _is_small_fake(leaf: Any) -> bool:
    if not isinstance(leaf, FakeTensor) or leaf.is_floating_point() or leaf.is_complex():
        return False
    return _symbolic(leaf) or leaf.numel() <= LIMIT


def _symbolic(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _has_symbols(tree: Any) -> bool:
    return any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in tree_iter(tree))


def _rows(shape: Sequence[int]) -> list[int]:
    return [1 if isinstance(size, torch.SymInt) else size for size in shape]


def _fits(value: Tensor, fake: Tensor) -> bool:
    return value.dtype == fake.dtype and list(value.shape) == _rows(fake.shape)
