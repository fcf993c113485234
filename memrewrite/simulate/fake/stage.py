"""Where a step runs on fake tensors: its twins, what they are given, and all that PyTorch is told of them meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from memrewrite.records.errors import DataDependentError, UsageError, first_line
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.runtime.assembled import Written
from memrewrite.runtime.room import room_simulated
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.fake.fakes import Twins, fakes_of, on_fakes, put_back, refuse_trained_beside
from memrewrite.simulate.fake.true_results import TrueResults
from memrewrite.state.random_state import preserved_rng
from memrewrite.targets.allocator import Allocator
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS, NoDataError
from memrewrite.torch_internals.fsdp import without_peers
from memrewrite.torch_internals.spread import is_divided, is_sparse_or_nested
from memrewrite.workload.held import Targets, held_by
from memrewrite.workload.step import Inputs, Step, device_type
from memrewrite.workload.surroundings import surroundings_put_back


@contextmanager
def nothing_drawn(module: nn.Module, inputs: Inputs) -> Iterator[torch.device]:
    """The device that a module and its inputs lie on, if it is there; afterwards the random state is as before."""
    tensors = [*tensors_of(module), *inputs.tensors()]
    if any(tensor.is_cuda for tensor in tensors) and not torch.cuda.is_available():
        # Autograd on fake CUDA tensors ends the process there.
        raise UsageError(
            "The model is on CUDA but PyTorch finds no CUDA device; move the model and its inputs to the CPU."
        )
    with preserved_rng(tensors):
        yield next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


@contextmanager
def step_on_fakes(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    allocator: Allocator | None,
    written: Written | None,
    twins: Twins | None = None,
) -> Iterator[tuple[nn.Module, Inputs, Targets]]:
    """The fake twin of a module, its inputs and the targets, where the step runs on them."""
    targets, lies_on = step.targets(module, inputs), device_type(module, inputs)
    try:
        if any(map(is_sparse_or_nested, targets.all)):
            raise NoDataError("how much a sparse tensor holds")
        with (
            put_back([*targets.buffers, *step.stepped_beside]),
            surroundings_put_back((), step.loss_fn),
            step.target.optimizer_kernels(),
            _sharding(step, module, lies_on) as shard,
            on_fakes(module, inputs, step.target, True, written, twins) as (twin, fakes),
            TrueResults(step.target),
            room_simulated(lambda wanted: None if allocator is None else allocator.make_room(wanted)),
            _handed_on(step, module, twin) as own,
        ):
            given = [*fakes.tensors(), *twin.parameters()]
            shard(twin)
            held = (targets.of_batch, targets.fixed, targets.beside)
            of_batch, fixed, beside = (fakes_of(tensors, given, step.target.moves(lies_on)) for tensors in held)
            yield twin, fakes, Targets(of_batch, fixed, beside, own)
            refuse_trained_beside(given, [] if step.loss_fn is None else [*chain(*held_by(step.loss_fn))])
    except FAKE_TENSOR_ERRORS as error:
        reason = first_line(error)
        raise DataDependentError(
            f"The step of {type(module).__name__} cannot be simulated, because its course depends on values "
            f"or on an operator without shape rules ({reason}); measure it instead."
        ) from error


@contextmanager
def _handed_on(step: Step, module: nn.Module, twin: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """The parameters of a module that the loss function names itself; the gradients it gives them are the twin's.

    But for parts of larger ones, to which autograd adds out of place, and where others wait already, to which it adds
    both as one: these count besides.
    """
    loss = None if step.mesh is not None else step.loss_fn  # where gradients are put together
    named = [] if loss is None else [id(tensor) for tensor in chain(*held_by(loss))]
    fakes = dict(twin.named_parameters())
    own = [(p, fakes[n], p.grad) for n, p in module.named_parameters() if p.requires_grad and id(p) in named]
    parts = set[int]()

    def look(gradient: Tensor, key: int) -> None:
        if gradient.untyped_storage().nbytes() != gradient.nbytes:
            parts.add(key)

    def hand_on(parameter: Tensor, fake: Tensor) -> None:
        if fake.grad is None and id(parameter) not in parts:
            fake.grad, parameter.grad = parameter.grad, None

    handles = [p.register_hook(partial(look, key=id(p))) for p, *_ in own]
    handles += [p.register_post_accumulate_grad_hook(partial(hand_on, fake=fake)) for p, fake, _ in own]
    try:
        for parameter, *_ in own:
            parameter.grad = None
        yield tuple(parameter for parameter, *_ in own)
    finally:
        for handle in handles:
            handle.remove()
        for parameter, _, gradient in own:
            parameter.grad = gradient


def _sharding(step: Step, module: nn.Module, device: str) -> AbstractContextManager[Callable[[nn.Module], None]]:
    """Gives what shards a fake twin as the step's mesh does, in place."""
    parallel = isinstance(step.mesh, Tp) and (step.mesh.applied or any(map(is_divided, module.parameters())))
    if parallel or not isinstance(step.mesh, Fsdp | Tp):
        return nullcontext(lambda twin: None)
    return without_peers(step.mesh, "cpu" if device == "meta" else device)
