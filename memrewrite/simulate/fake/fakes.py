"""The fake twin of a module: the same structure over fake tensors, which have shapes and devices but no memory.

A tensor on the meta device stands for one that is not there yet: its fake lies on the CPU, or, among the inputs, where
the model lies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.runtime.assembled import Written, assembled
from memrewrite.runtime.dropin import own
from memrewrite.runtime.guards import hooks_of
from memrewrite.runtime.promise import Promise
from memrewrite.simulate.fake.constant_values import known_values
from memrewrite.simulate.fake.copier import Copier
from memrewrite.simulate.fake.refusals import takes_data
from memrewrite.simulate.fake.stand_ins import functions_on_fakes
from memrewrite.simulate.fake.unchanged import Unchanged
from memrewrite.state.function_caches import fakes_forgotten
from memrewrite.targets.eager import EAGER, Target
from memrewrite.torch_internals.dispatch_modes import Recall
from memrewrite.torch_internals.fake_tensors import (
    FAKE_TENSOR_ERRORS,
    FakeTensor,
    FakeTensorMode,
    NoDataError,
    as_parameter,
    fake_met,
    fake_of,
    met_by,
    real_rules_on_fake_tensors,
    without_fake_gradients,
)
from memrewrite.torch_internals.spread import Spread, local_part
from memrewrite.workload.step import Inputs
from memrewrite.workload.surroundings import surroundings_put_back

_CPU = torch.device("cpu")


def fake_twin(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A structural copy of ``module`` whose tensors are fake: same dtype, device, strides and ``requires_grad``.

    What is tied stays tied, on the level of tensors and of storages. The real tensors are not touched or copied,
    gradients are left out, and the copy can change its buffers and attributes without the original seeing it.
    """
    twin: nn.Module = Copier(lambda tensor: _fake(tensor, mode)).copy(module)
    return twin


class _Twin:
    """The fake twin of a module, and of all that is written for it; ``moved`` is as in ``fake_inputs``."""

    def __init__(self, module: nn.Module, moved: bool) -> None:
        # Constants outside the module (globals of its file) are real; they are read as fakes and not counted.
        self.mode = mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._copier = Copier(lambda tensor: _fake(tensor, mode, moved=moved))
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

    def take(self, module: nn.Module, moved: bool) -> _Twin:
        """The twin that was given back, if it is as it was, else a new one; ``moved`` is the same each time."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is module and kept[1].as_noted() else _Twin(module, moved)

    def give_back(self, module: nn.Module, twin: _Twin) -> None:
        """Let the next pass have it."""
        self._kept = module, twin


def fake_inputs(inputs: Inputs, mode: FakeTensorMode, device: torch.device = _CPU, moved: bool = False) -> Inputs:
    """The same inputs with fake tensors; a tensor given twice stays one tensor.

    Those on the meta device stand for tensors on ``device``. Where all are ``moved`` to another device, parts of larger
    tensors come without the rest.
    """
    copier = Copier(lambda tensor: _fake(tensor, mode, device, moved))
    return inputs.changed(copier.copy)


def fakes_of(tensors: Sequence[Tensor], like: Sequence[Tensor], moved: bool) -> tuple[Tensor, ...]:
    """What operators see in place of real ``tensors`` that they meet beside ``like``, of which one is fake.

    A fake mode gives one fake for each real tensor, and one storage for those that share theirs, while one lives.
    ``moved`` is as in ``fake_inputs``.
    """
    mode = _mode_of(like)
    return tuple(tensors) if mode is None else tuple(fake_met(tensor, mode, moved) for tensor in tensors)


@contextmanager
def put_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put back what real tensors hold: operators that are given no fake one, as a counter's ``add_``, write them.

    Those that train have no gradient meanwhile.
    """
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    for tensor, _ in gradients:
        tensor.grad = None
    written = (tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta)
    copies = [(tensor, tensor.detach().clone()) for tensor in written]
    try:
        yield
    finally:
        for tensor, copy in copies:
            if not torch.equal(tensor, copy):
                tensor.detach().copy_(copy)
        for tensor, gradient in gradients:
            tensor.grad = gradient


def refuse_trained_beside(like: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Raise ``UsageError`` where real tensors, but for ``known`` ones, got gradients beside ``like``, some of it fake.

    Neither these gradients nor what an optimizer keeps of them is counted.
    """
    if (mode := _mode_of(like)) is None:
        return
    held = {id(tensor) for tensor in known}
    trained = [tensor for tensor in without_fake_gradients(met_by(mode)) if id(tensor) not in held]
    if trained:
        sizes = ", ".join(dict.fromkeys(str(tuple(tensor.shape)) for tensor in trained))
        raise UsageError(
            f"The step trains tensors that are no parameters of the model and its submodules ({sizes}): a global, a "
            "closure or an object that memrewrite does not look into has them (a forward that was put on the model "
            "and calls the old one, bound to it: let it call that with self); make them parameters or submodules of "
            "the model."
        )


def _mode_of(like: Sequence[Tensor]) -> Any:
    """The mode of the first fake among them, None where there is none."""
    return next((tensor.fake_mode for tensor in like if isinstance(tensor, FakeTensor)), None)


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
    moved = target.moves(device.type)
    twin = _Twin(module, moved) if twins is None else twins.take(module, moved)
    running, fakes = twin.running(written), fake_inputs(inputs, twin.mode, device, moved)
    if twins is not None:
        twin.note()
    pairs = zip(fakes.tensors(), inputs.tensors(), strict=True)
    given = [(fake, real) for fake, real in pairs if these and not real.is_meta]
    generated = own(module) is not None or (written is not None and "" in written)
    # Where forward is generated, none of the user's code runs but the hooks of what it calls.
    hooks = [hook for part in module.modules() for hook in hooks_of(part)] if generated else []
    around = surroundings_put_back(() if generated else (module,), *hooks)
    with around, fakes_forgotten(module), running_on_fakes(twin.mode, target, given):
        yield running, fakes
    if twins is not None:
        twins.give_back(module, twin)


@contextmanager
def running_on_fakes(
    mode: FakeTensorMode, target: Target = EAGER, given: Sequence[tuple[Tensor, Tensor]] = ()
) -> Iterator[None]:
    """Run what follows on the fake tensors of ``mode``, as on ``target``; the values of ``given`` fakes are known.

    Raises one of ``FAKE_TENSOR_ERRORS`` for all that takes data. Gradients that real tensors get are taken away.
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
    finally:
        without_fake_gradients(met_by(mode))


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device = _CPU, moved: bool = False) -> Tensor:
    # Detached, because the conversion would also copy .grad and the history of a non-leaf.
    plain = tensor.detach()
    if (spread := Spread.like(plain)) is not None:
        fake = spread.of(_fake(local_part(plain), mode, device, moved))
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    fake = FakeTensor(mode, plain, device) if plain.is_meta else fake_of(plain, mode, moved)
    if isinstance(tensor, nn.Parameter):
        return as_parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
