"""The values of tensors that no input decides, known while a model runs on fake tensors.

Models ask such values what to do: transformers makes positions with ``arange`` and leaves a mask out if nothing but
consecutive positions is in them. A fake tensor has no answer, and code that sees one does something else. Here small
integer and boolean tensors that are made of nothing but numbers keep their values beside the fake ones, and so do those
with fractions that one number fills, such as a mask of ones, until they are written. Whatever holds parameters or
buffers stays unknown, and so do inputs, unless a run is about these very inputs. What ``rand`` draws is known not to be
below 0, the share of layers that transformers drops unless it is asked to drop some.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from memrewrite.records.errors import CaptureError
from memrewrite.simulate.fake.rows import has_symbols, symbolic, two_rows, value_by_rows
from memrewrite.torch_internals.dispatch_modes import DEVICE, Layer
from memrewrite.torch_internals.fake_tensors import FakeTensor, NoDataError, in_place_of_modes, known_as_real
from memrewrite.torch_internals.operators import OpOverload, is_mutable, named_arguments, schema_name, written_arguments
from memrewrite.torch_internals.pytrees import tensors_in, tree_map

LIMIT = 2**20  # elements, at most 8 MiB; what is larger is not what a model asks
_FACTORIES = {"arange", "eye", "tril_indices", "triu_indices"}
# Each gives one number everywhere, whatever the values of the tensor it may be given: a number, or an argument's name.
_FILLS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1, "scalar_tensor": "s"}
_FILLS |= {"full": "fill_value", "new_full": "fill_value", "full_like": "fill_value"}
_LIFTS = {"lift_fresh", "lift_fresh_copy"}  # what torch.tensor(...) becomes
_DRAWS = {"aten::rand", "aten::rand_like"}  # numbers from 0 to 1
# What comparing them with a number gives: where that is at most 0, or less than 0.
_AT_MOST_0, _LESS_THAN_0 = {"lt": False, "ge": True}, {"le": False, "gt": True}
_RESHAPING = {"resize_", "resize_as_", "set_"}  # what they write may be another storage
_ACTIVE: list["KnownValues"] = []  # the innermost last
_PLACE = {"device": torch.device("cpu"), "pin_memory": None, "non_blocking": False}  # where values are computed


@contextmanager
def known_values(given: Iterable[tuple[Tensor, Tensor]] = ()) -> Iterator["KnownValues"]:
    """Know values while a fake mode, which must be on, runs a model; to others a known tensor seems a real one.

    ``given`` are fake tensors and the real ones they stand for, if the run is about these alone.
    """
    mode = KnownValues()
    for fake, real in given:
        mode.copy(fake, real)
    with known_as_real(mode.seems_real), mode:
        _ACTIVE.append(mode)
        try:
            yield mode
        finally:
            _ACTIVE.remove(mode)


class KnownValues(Layer):
    """While it is active, values are computed beside fake tensors where all they are made of is known.

    Where sizes vary, a value is two rows (see ``rows``). What a tensor with a known value is asked (``item``, ``bool``)
    is answered; all other operators are left to the fake mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()
        self._storages: set[StorageWeakRef] = set()  # where values lie or lay: most writes are to none of them
        self._drawn: Any = WeakTensorKeyDictionary()  # where each lies
        self.asked = False  # whether code outside PyTorch has asked for values that are not known
        self.would_know = False  # whether one of them is not known only because sizes vary

    def knows(self, tensor: object) -> bool:
        """Whether the value of ``tensor`` is known."""
        return isinstance(tensor, Tensor) and self.value(tensor) is not None

    def seems_real(self, tensor: object) -> bool:
        """What ``knows`` says, to code outside PyTorch; ``asked`` notes that it had to be told no."""
        known = self.knows(tensor)
        self.asked |= not known
        self.would_know |= isinstance(tensor, Tensor) and not known and self._decided(tensor)
        return known

    def check(self) -> None:
        """Raise ``CaptureError`` where a value was asked for that is not known only because sizes vary."""
        if self.would_know:
            raise CaptureError("The sizes decide values that forward asks for.")

    def value(self, tensor: Tensor) -> Tensor | None:
        """The value of ``tensor``, on the CPU; None where it is not known."""
        value, storage = self._values.get(tensor, (None, None))
        if value is None or _storage(tensor) != storage or not _fits(value, tensor):
            return None  # what it was set to through .data, perhaps, is another tensor's
        known: Tensor = value
        return known

    def _decided(self, tensor: Tensor) -> bool:
        """Whether the value is known, or would be if no size varied."""
        return tensor in self._values and self._values[tensor][1] == _storage(tensor)

    def keep(self, fake: Tensor, value: Tensor) -> None:
        """Take ``value`` for that of ``fake`` from now on."""
        if type(value) is Tensor and fake.layout is torch.strided and _small(value) and _fits(value, fake):
            self._set(fake, value)

    def _fill(self, fake: Tensor, number: float) -> None:
        """Take ``number`` for what ``fake`` holds everywhere; of fractions that is one number, which a write ends.

        Zeros with fractions are what sums and states of optimizers begin as, and nothing that is asked. Where sizes
        vary, fractions stay unknown: what is asked of them there is how many there are.
        """
        shape = two_rows(fake.shape)
        if math.prod(shape) > LIMIT or fake.layout is not torch.strided:
            return
        with in_place_of_modes():
            one = torch.full((), number, dtype=fake.dtype, device="cpu")
            if not fake.is_floating_point():
                self.keep(fake, one.repeat(shape))
            elif number != 0 and not symbolic(fake):
                self._set(fake, one.expand(shape))

    def _set(self, fake: Tensor, value: Tensor | None) -> None:
        storage = _storage(fake)
        self._values[fake] = (value, storage)
        self._storages.add(storage)

    def copy(self, fake: Tensor, real: Tensor) -> None:
        """Take what ``real`` holds now for the value of ``fake``."""
        if is_asked_for(real):
            with in_place_of_modes():
                self.keep(fake, real.detach().cpu().clone())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and type(args[0]) is FakeTensor:  # what a third of all calls are, where a graph is traced
            return args[0].device
        kind = _kind(func)
        if kind == "body":
            result = self.below(func, types, args, kwargs)
            self._forget(tensors_in((args, kwargs)))  # it may have written them
            return result
        if kind == "question" and not any(map(symbolic, tensors_in((args, kwargs)))):
            answer = self._compute(func, args, kwargs)
            if isinstance(answer, int | float):
                return answer
        if kind == "sized" and (made := self._sized(func, args, kwargs)) is not None:
            return made
        if kind != "write":
            result = self.below(func, types, args, kwargs)
            if kind == "draw":
                self._drawn[result] = _storage(result)
            fraction = type(result) is FakeTensor and result.is_floating_point()  # as most are
            if kind == "fill" and isinstance(result, FakeTensor):
                self._filled(func, args, kwargs, result)
            elif kind in ("function", "sized") and not fraction and any(map(_is_small_fake, _results(result))):
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
        places = _places(written)
        self._forget_draws(places)
        there = self._values_in(places)
        if not there:
            return
        tensors = tensors_in((args, kwargs))
        varies = any(map(symbolic, (*tensors, *there))) or any(value is None for value in there.values())
        decided = varies and all(map(self._decided, tensors))
        # Where the shape of a tensor itself has just changed, its value has not followed yet; nor has a value that is
        # not where the others are.
        sure = schema_name(func).partition("::")[2] not in _RESHAPING and torch.Tag.inplace_view not in func.tags
        sure &= not varies and len(_places(there.values())) == len(places)
        sure &= not any(value.is_floating_point() for value in there.values() if value is not None)  # one number each
        if not sure or self._compute(func, args, kwargs) is None:
            self._forget(written, decided)

    def _sized(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What an operator gives whose values decide how many there are; None where they are not known."""
        tensors = tensors_in((args, kwargs))
        values = None if any(map(symbolic, tensors)) else self._compute(func, args, kwargs)
        return None if values is None else tree_map(partial(self._like, device=tensors[0].device), values)

    def _like(self, value: Any, device: torch.device) -> Any:
        """A fake tensor that is known to hold this value."""
        if not isinstance(value, Tensor):
            return value
        place = {"dtype": value.dtype, "device": device}
        made = self.below(torch.ops.aten.empty.memory_format, (), (list(value.shape),), place)
        self.keep(made, value)
        return made

    def _filled(self, func: OpOverload, args: Any, kwargs: Any, result: FakeTensor) -> None:
        """Keep the value of what one number fills, where that does not vary."""
        number: Any = _FILLS[schema_name(func).removeprefix("aten::")]
        number = named_arguments(func, args, kwargs)[number] if isinstance(number, str) else number
        if isinstance(number, int | float):
            self._fill(result, number)
        elif _is_small_fake(result):
            self._set(result, None)

    def _follow(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Keep the values of what a function gave, where they are known."""
        name = schema_name(func).removeprefix("aten::")
        if (number := self._compared(name, args)) is not None:
            self._fill(result, number)
            return
        if name in _LIFTS:
            self.copy(result, args[0])
            return
        tensors = tensors_in((args, kwargs))
        if (not tensors and name not in _FACTORIES) or not all(map(self._decided, tensors)):
            return
        results = _results(result)
        varies = any(map(symbolic, (*tensors, *results))) or has_symbols((args, kwargs))
        values = self._by_rows(func, name, (args, kwargs), result) if varies else self._compute(func, args, kwargs)
        for fake, value in itertools.zip_longest(results, _results(values)):
            # Else a write would reach both where it should reach one.
            if value is not None and all(_share(fake, t) or not _share(value, self.value(t)) for t in tensors):
                self.keep(fake, value)
            elif _is_small_fake(fake) and (varies or not all(map(self.knows, tensors))):
                self._set(fake, None)

    def _compared(self, name: str, args: Any) -> bool | None:
        """What comparing drawn numbers with another one gives; None where that depends on them, or is no such thing."""
        answer = _AT_MOST_0.get(name, _LESS_THAN_0.get(name))
        if answer is None:
            return None
        drawn, number = args
        if not isinstance(number, int | float) or drawn not in self._drawn or self._drawn[drawn] != _storage(drawn):
            return None
        sure = number <= 0 if name in _AT_MOST_0 else number < 0
        return answer if sure else None

    def _by_rows(self, func: OpOverload, name: str, call: Any, result: Any) -> Any:
        if not all(map(self.knows, tensors_in(call))) or not isinstance(result, Tensor):
            return None
        with suppress(Exception), in_place_of_modes():  # what cannot be computed is not known
            return value_by_rows(func, name, call, result, self._values, lambda *call: self._compute(func, *call))
        return None

    def _compute(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What the operator gives for the values, on which it does what it does; None where that is not known."""
        if torch.Tag.nondeterministic_seeded in func.tags or not all(map(self.knows, tensors_in((args, kwargs)))):
            return None
        values = tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        there = {name: _PLACE.get(name, value) if value is not None else None for name, value in values[1].items()}
        with suppress(Exception), in_place_of_modes():  # what cannot be computed is not known
            return func(*values[0], **there)
        return None

    def _forget(self, tensors: Sequence[Tensor], decided: bool = False) -> None:
        """Know no more what ``tensors`` hold, nor what others hold that share their memory.

        If it is ``decided``, it would be known if no size varied.
        """
        places = _places(tensors)
        self._forget_draws(places)
        for tensor in self._values_in(places):
            _, storage = self._values.pop(tensor)
            if decided:
                self._values[tensor] = (None, storage)

    def _values_in(self, places: set[StorageWeakRef]) -> dict[Tensor, Any]:
        """The tensors whose values are kept for what lies there, with these."""
        if places.isdisjoint(self._storages):
            return {}
        return {tensor: value for tensor, (value, storage) in self._values.items() if storage in places}

    def _forget_draws(self, places: set[StorageWeakRef]) -> None:
        """What was drawn there may have been written since."""
        for tensor in [tensor for tensor, storage in self._drawn.items() if storage in places]:
            del self._drawn[tensor]


@cache
def _kind(func: Any) -> str:
    """What to do about an operator."""
    if not isinstance(func, OpOverload):
        return "body"
    if is_mutable(func):
        return "write"
    if torch.Tag.data_dependent_output in func.tags:
        return "question"
    if schema_name(func) in _DRAWS:
        return "draw"
    if schema_name(func).removeprefix("aten::") in _FILLS:
        return "fill"
    own = func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
    if own and torch.Tag.dynamic_output_shape in func.tags:
        return "sized"
    return "function" if own and "empty" not in schema_name(func) else "other"


def _results(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []


def _written(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    return tensors_in(written_arguments(func, args, kwargs))


def _share(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and _storage(one) == _storage(other)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _places(tensors: Iterable[Tensor]) -> set[StorageWeakRef]:
    return {_storage(tensor) for tensor in tensors if tensor.layout is torch.strided}


def is_asked_for(real: Tensor) -> bool:
    """Whether a real tensor is of a kind whose values models ask for: few whole numbers or truth values."""
    return type(real) is Tensor and real.layout is torch.strided and _small(real)


def asked_of(tensor: Tensor) -> Tensor | None:
    """What a tensor, fake or not, holds, where it is of a kind whose values models ask for; else None.

    Raises ``NoDataError`` for a fake one whose value is not known.
    """
    if not _is_small_fake(tensor):
        return tensor.detach() if is_asked_for(tensor) else None
    if (value := _ACTIVE[-1].value(tensor) if _ACTIVE else None) is None:
        raise NoDataError("what whole numbers or truth values there are")
    return value


def _small(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= LIMIT


def _is_small_fake(leaf: Any) -> bool:
    if not isinstance(leaf, FakeTensor) or leaf.is_floating_point() or leaf.is_complex():
        return False
    return symbolic(leaf) or leaf.numel() <= LIMIT


def _fits(value: Tensor, fake: Tensor) -> bool:
    return value.dtype == fake.dtype and list(value.shape) == two_rows(fake.shape)
