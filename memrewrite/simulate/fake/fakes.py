"""The fake twin of a module: the same structure over fake tensors, which have shapes and devices but no memory.

A tensor on the meta device stands for one that is not there yet: its fake lies on the CPU, or, among the inputs, where
the model lies.
"""

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.runtime.assembled import Written, assembled
from memrewrite.runtime.dropin import empty_like, own, prepare
from memrewrite.runtime.promise import Promise
from memrewrite.simulate.fake.constant_values import known_values
from memrewrite.simulate.fake.refusals import takes_data
from memrewrite.simulate.fake.stand_ins import functions_on_fakes
from memrewrite.simulate.fake.unchanged import Unchanged
from memrewrite.state import containers
from memrewrite.state.attributes import OPAQUE
from memrewrite.state.function_caches import fakes_forgotten
from memrewrite.targets.eager import EAGER, Target
from memrewrite.torch_internals.dispatch_modes import Recall
from memrewrite.torch_internals.fake_tensors import (
    FAKE_TENSOR_ERRORS,
    FakeTensor,
    FakeTensorMode,
    NoDataError,
    as_parameter,
    fake_of,
    real_rules_on_fake_tensors,
)
from memrewrite.torch_internals.pytrees import tree_map
from memrewrite.torch_internals.spread import Spread, local_part
from memrewrite.workload.step import Inputs

_CPU = torch.device("cpu")


def fake_twin(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A structural copy of ``module`` whose tensors are fake: same dtype, device, strides and ``requires_grad``.

    What is tied stays tied, on the level of tensors and of storages. The real tensors are not touched or copied,
    gradients are left out, and the copy can change its buffers and attributes without the original seeing it.
    """
    twin: nn.Module = _Copier(lambda tensor: _fake(tensor, mode)).copy(module)
    return twin


class _Twin:
    """The fake twin of a module, and of all that is written for it."""

    def __init__(self, module: nn.Module) -> None:
        # Constants outside the module (globals of its file) are real; they are read as fakes and not counted.
        self.mode = mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._copier = _Copier(lambda tensor: _fake(tensor, mode))
        self._bare: nn.Module = self._copier.copy(module)
        self._unchanged = Unchanged()
        self._noted = 0  # how many of the copies are among these
        self._tensors: list[Tensor] = []

    def running(self, written: Written | None) -> nn.Module:
        """What is ``written`` for the module on its twin, the twin itself where nothing is; it promises nothing."""
        if written is None:
            return self._bare
        copy = self._copier.copy
        fakes = {
            # Nothing is traced here, and what code would compare then takes longer to look up than all it runs by.
            path: (replace(program, look=_nothing), {name: copy(tensor) for name, tensor in constants.items()})
            for path, (program, constants) in written.items()
        }
        twin = assembled(self._bare, fakes)
        for kept in filter(None, (own(twin.get_submodule(path)) for path in written)):
            kept.promise = Promise(kept.promise.name, None, False, {})
        return twin

    def note(self) -> None:
        """Take the module and its twin for what they are now; ``as_noted`` says whether they still are that."""
        originals, copies = self._copier.made(self._noted)
        self._unchanged.add(originals)
        self._unchanged.add(copies)
        self._tensors += [copied for copied in copies if isinstance(copied, Tensor)]
        self._noted += len(copies)

    def as_noted(self) -> bool:
        """Whether module and twin are as they were noted, but for gradients, of which the twin has none now."""
        for tensor in self._tensors:
            tensor.grad = None
        return self._copier.knows_all and self._unchanged.holds()


def _nothing(module: nn.Module) -> tuple[()]:
    return ()


class Twins:
    """Keeps the fake twin of a module from one pass of a program to the next, as long as nothing has changed.

    To copy a module of many parts takes longer than half a pass. Of fake tensors only the form counts, so what a pass
    writes in place changes nothing; where it changes an attribute, a container or the form of a tensor of the twin, or
    something changes those of the module, the next pass gets another twin. So does one where something was copied of
    which it cannot be told.
    """

    def __init__(self) -> None:
        self._kept: tuple[nn.Module, _Twin] | None = None

    def take(self, module: nn.Module) -> _Twin:
        """The twin that was given back, if it is as it was, else a new one."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is module and kept[1].as_noted() else _Twin(module)

    def give_back(self, module: nn.Module, twin: _Twin) -> None:
        """Let the next pass have it."""
        self._kept = module, twin


def fake_inputs(inputs: Inputs, mode: FakeTensorMode, device: torch.device = _CPU) -> Inputs:
    """The same inputs with fake tensors; a tensor given twice stays one tensor.

    Those on the meta device stand for tensors on ``device``.
    """
    copier = _Copier(lambda tensor: _fake(tensor, mode, device))

    def convert(leaf: Any) -> Any:
        return copier.copy(leaf) if isinstance(leaf, Tensor) else leaf

    return Inputs(tree_map(convert, inputs.args), tree_map(convert, inputs.kwargs))


def fakes_of(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What operators see in place of real ``tensors`` that they meet beside ``like``, of which one is fake.

    A fake mode gives one fake for each real tensor, and one storage for those that share theirs, while one lives.
    """
    mode = next((tensor.fake_mode for tensor in like if isinstance(tensor, FakeTensor)), None)
    return tuple(tensors) if mode is None else tuple(mode.from_tensor(tensor) for tensor in tensors)


@contextmanager
def on_fakes(
    module: nn.Module,
    inputs: Inputs,
    target: Target = EAGER,
    these: bool = False,
    written: Written | None = None,
    twins: Twins | None = None,
) -> Iterator[tuple[nn.Module, Inputs]]:
    """The fake twin of a module and its fake inputs, in the mode they run in, as on ``target``.

    With ``these``, the run is about these inputs alone, and the values of small ones without fractions are known. What
    is ``written`` makes of the twin what it makes of the module, which is never made then. The twin may be one of
    ``twins``, which keep it then.
    """
    device = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), _CPU)
    twin = _Twin(module) if twins is None else twins.take(module)
    running, fakes = twin.running(written), fake_inputs(inputs, twin.mode, device)
    if twins is not None:
        twin.note()
    pairs = zip(fakes.tensors(), inputs.tensors(), strict=True)
    given = [(fake, real) for fake, real in pairs if these and not real.is_meta]
    with fakes_forgotten(module), running_on_fakes(twin.mode, target, given):
        yield running, fakes
    if twins is not None:
        twins.give_back(module, twin)


@contextmanager
def running_on_fakes(
    mode: FakeTensorMode, target: Target = EAGER, given: Sequence[tuple[Tensor, Tensor]] = ()
) -> Iterator[None]:
    """Run what follows on the fake tensors of ``mode``, as on ``target``; the values of ``given`` fakes are known.

    Raises one of ``FAKE_TENSOR_ERRORS`` for all that takes data.
    """
    try:
        with (
            real_rules_on_fake_tensors(),
            functions_on_fakes(),
            target.kernels(),
            mode,
            Recall(mode),
            known_values(given),
        ):
            yield
    except Exception as error:
        if isinstance(error, FAKE_TENSOR_ERRORS) or not takes_data(error):
            raise
        raise NoDataError(str(error)) from error


def tensors_of(*modules: nn.Module) -> list[Tensor]:
    """Every tensor that ``fake_twin`` would replace, each once: parameters, buffers, tensors in plain attributes."""
    finder = _Finder()
    for module in modules:
        finder.copy(module)
    return finder.found


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device = _CPU) -> Tensor:
    # Detached, because the conversion would also copy .grad and the history of a non-leaf.
    plain = tensor.detach()
    if (spread := Spread.like(plain)) is not None:
        fake = spread.of(_fake(local_part(plain), mode, device))
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    fake = FakeTensor(mode, plain, device) if plain.is_meta else fake_of(plain, mode)
    if isinstance(tensor, nn.Parameter):
        return as_parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


_PLAIN_DICTS = {dict, OrderedDict}  # of which a module has a dozen; their own way to copy them is the faster one
_SHARED = (str, int, float, bool, type, type(None))
_CONSTANTS = {str, int, float, bool, type(None)}  # known by their type, as most attributes of a module are


class _Copier:
    """Copies modules and plain containers, converts tensors, shares everything else.

    Not ``copy.deepcopy``: modules hold locks, generators and other objects that it cannot copy, and may define their
    own ``__deepcopy__`` or ``__reduce__``.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []  # keeps the ids in the memo from being used again
        self._copies: list[Any] = []
        self.knows_all = True  # whether all that it copied is in these

    def made(self, start: int) -> tuple[list[Any], list[Any]]:
        """What was copied, and the copies, from the one numbered ``start`` on."""
        return self._originals[start:], self._copies[start:]

    def copy(self, value: Any) -> Any:
        """The copy of ``value``; the same object for the same object."""
        if isinstance(value, _SHARED):
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._object(value)
        if containers.is_container(value):
            return self._container(value)
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            changed = any(new is not old for new, old in zip(items, value, strict=True))
            return self._remember(value, tuple.__new__(type(value), items) if changed else value)
        if is_dataclass(value) and hasattr(value, "__dict__"):
            return self._object(value)
        return self._reference(value)

    def _tensor(self, value: Tensor) -> Tensor:
        """A parameter keeps what libraries put on it, such as the scales of 4-bit weights."""
        copied: Tensor = self._remember(value, self._convert(value))
        for name, item in vars(value).items() if isinstance(value, nn.Parameter) else ():
            held = _holds_tensors(item) and id(item) not in self._memo
            vars(copied).setdefault(name, self._object(item) if held else self.copy(item))
        return copied

    def _object(self, value: Any) -> Any:
        kept = own(value) if isinstance(value, nn.Module) else None
        copied = self._remember(value, object.__new__(type(value)) if kept is None else empty_like(value))
        self.knows_all &= kept is None  # a drop-in has more to itself
        # Past any __setattr__: the attributes are those of a finished object.
        vars(copied).update({name: self._attribute(item) for name, item in vars(value).items()})
        if kept is not None:
            prepare(copied, {name: self.copy(tensor) for name, tensor in kept.constants.items()})
        return copied

    def _attribute(self, item: Any) -> Any:
        """``copy``, shorter for what most attributes of modules are: constants and empty tables of hooks."""
        if type(item) in _CONSTANTS:
            return item
        empty = type(item) in _PLAIN_DICTS and not item and id(item) not in self._memo
        return self._remember(item, item.copy()) if empty else self.copy(item)

    def _container(self, value: Any) -> Any:
        if type(value) in _PLAIN_DICTS:
            copied = self._remember(value, value.copy())
            if not value:
                return copied
            if all(type(key) is str for key in value):
                for key, part in value.items():
                    new = self.copy(part)
                    if new is not part:
                        copied[key] = new
                return copied
        else:
            copied = self._remember(value, containers.copied(value))
        parts = containers.contents(value)
        changed = [self.copy(part) for part in parts]
        if any(one is not other for one, other in zip(changed, parts, strict=True)):
            containers.put(copied, changed)
        return copied

    def _reference(self, value: Any) -> Any:
        """Bound methods, partials and weak references lead to the copy of what they lead to."""
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords))
        if isinstance(value, weakref.ref) and isinstance(target := value(), Tensor | nn.Module):
            return weakref.ref(self.copy(target))
        return value

    def _remember(self, value: Any, copied: Any) -> Any:
        self._memo[id(value)] = copied
        self._originals.append(value)
        self._copies.append(copied)
        return copied


def _holds_tensors(value: Any) -> bool:
    """Whether this is a plain object with tensors as attributes."""
    plain = hasattr(value, "__dict__") and not isinstance(value, (*OPAQUE, dict))
    return plain and any(isinstance(each, Tensor) for each in vars(value).values())


class _Finder(_Copier):
    """Goes where a copier goes and copies nothing: ``found`` are the tensors it meets, each once."""

    def __init__(self) -> None:
        found: list[Tensor] = []  # not self: a cycle would keep the tensors alive until it is collected

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        super().__init__(keep)
        self.found = found

    def _object(self, value: Any) -> Any:
        self._remember(value, value)
        for item in vars(value).values():  # most attributes of modules are constants and empty tables of hooks
            if type(item) not in _CONSTANTS and not (type(item) in _PLAIN_DICTS and not item):
                self.copy(item)
        kept = own(value) if isinstance(value, nn.Module) else None
        for tensor in kept.constants.values() if kept is not None else ():
            self.copy(tensor)
        return value

    def _container(self, value: Any) -> Any:
        self._remember(value, value)
        for part in containers.contents(value):
            if type(part) is not str:
                self.copy(part)
        return value
