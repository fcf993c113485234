"""The exact allocation timeline of training steps, on fake tensors: no device memory, no change to the module.

The real module's whole step runs (forward, loss, backward, optimizer) on a fake twin while every storage is counted
from birth to death. ``run_tracked`` does the same on real tensors, which is how memory is measured on the CPU.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from memrewrite.records.errors import DataDependentError, UsageError, first_line
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.runtime.assembled import Written
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.runtime.room import room_simulated
from memrewrite.simulate.fake.batch import part_of
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.fake.fakes import Twins, fakes_of, on_fakes, put_back, refuse_trained_beside
from memrewrite.simulate.fake.true_results import TrueResults
from memrewrite.simulate.memory.counted import Life
from memrewrite.simulate.memory.course import Noted, Noting, notable
from memrewrite.simulate.memory.given import (
    communicated,
    layout_for,
    parameters_apart,
    register_apart,
    register_given,
)
from memrewrite.simulate.memory.places import Places
from memrewrite.simulate.memory.recorder import (
    ACTIVATIONS,
    AVERAGE,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    RESTS,
    STATE,
    TEMPORARIES,
    WORKSPACES,
    Recorder,
    take_step,
)
from memrewrite.simulate.memory.repeats import repeated
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.simulate.memory.updates import updates_repeated
from memrewrite.simulate.timeline import Timeline, with_rests, with_workspaces
from memrewrite.state.random_state import preserved_rng
from memrewrite.targets.allocator import Allocator, Requests, allocator_on, cuda_allocator
from memrewrite.targets.transients import Transients
from memrewrite.targets.workspaces import library_requests
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS, FakeTensor, NoDataError
from memrewrite.torch_internals.fsdp import seen_by, without_peers
from memrewrite.torch_internals.fsdp_offload import copies_seen
from memrewrite.torch_internals.spread import is_divided, is_sparse_or_nested
from memrewrite.workload.held import Targets, held_by
from memrewrite.workload.step import Inputs, Running, Step, device_type
from memrewrite.workload.surroundings import surroundings_put_back

__all__ = [
    "ACTIVATIONS",
    "AVERAGE",
    "BUFFERS",
    "GRADIENTS",
    "INPUTS",
    "PARAMETERS",
    "RESTS",
    "STATE",
    "TEMPORARIES",
    "WORKSPACES",
    "Life",
    "Noted",
    "Timeline",
    "Twins",
    "layout_for",
    "requests",
    "run_tracked",
    "simulate",
    "with_workspaces",
]

T = TypeVar("T")
_SMALLER = (0.75, 0.5)  # of a batch


def simulate(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    *,
    workspace_bytes: int = 0,
    steps: int = 2,
    attribute: bool = False,
    probe: bool = True,
    blocks: bool = True,
    both: bool = False,
    written: Written | None = None,
    noted: Noted | None = None,
    twins: Twins | None = None,
) -> Timeline:
    """Run ``steps`` steps on a fake twin of ``module``, or of what is ``written`` for it, and count.

    ``workspace_bytes`` is what libraries hold on the device besides tensors (``targets.workspaces``); it is added
    throughout, unless there is nothing for them to do. On CUDA, what operators take while they run is measured there,
    one operator at a time, the first time its signature is met; for a target without it, or with ``probe`` False, it is
    known of attention and of sums alone and the device is left alone. ``attribute`` says by which submodule every
    storage was made. With ``blocks`` False what is asked for counts, and not what the caching allocator of CUDA hands
    out for it; with ``both`` the timeline has that besides, as ``asked_for``. ``noted`` is what is known of the passes
    of what is written, and gets to know them; the twin may be one of ``twins``. Module, tensors and random state stay.
    Raises ``UsageError`` for CUDA tensors without CUDA, ``DataDependentError`` where the step depends on data.
    """
    kind, own = step.device_type(module, inputs), Noted()

    def once(transients: Transients | None) -> Timeline:
        allocator = allocator_on(kind, layout_for(step, module, inputs)) if blocks else None
        counted = transients, steps, attribute, allocator, workspace_bytes
        first = transients is not None and (transients.empty or own.courses)
        known = own if first and noted is None else noted
        with _on_fakes(module, inputs, step, allocator, written, twins) as (twin, fakes, targets):
            return run_tracked(twin, fakes, step, *counted, targets, both, known)

    def look(transients: Transients) -> None:
        with _on_fakes(module, inputs, step, None, written) as (twin, fakes, targets):
            run_tracked(twin, fakes, step, transients, 1, targets=targets)

    ahead = None if notable(step, inputs) else look
    return with_workspaces(_counting_transients(module, inputs, step, probe, once, ahead), workspace_bytes)


def requests(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    *,
    workspace_bytes: int = 0,
    written: Written | None = None,
    noted: Noted | None = None,
) -> Requests:
    """What CUDA's allocator is asked for in two steps of ``module``, and in more with smaller batches between.

    Without those where the model, its program or the loss function takes none; otherwise like ``simulate``. In those
    what libraries plan for each batch takes what it does of a larger one.
    """

    def once(transients: Transients | None) -> Requests:
        allocator = cuda_allocator(layout_for(step, module, inputs))
        with _on_fakes(module, inputs, step, allocator, written) as (twin, fakes, targets):
            tracker = Tracker(device_type(twin, fakes), transients, None, step.target, allocator)
            loop, _ = _taken(twin, fakes, step, [tracker], 2, workspace_bytes, targets, noted)
            asked = allocator.asked()
            again = _repeating([tracker]) if _on_plain_fakes(twin, step) else nullcontext()
            larger = nullcontext() if transients is None else transients.smaller_batches()
            try:
                with again, larger, warnings.catch_warnings():
                    warnings.simplefilter("error", FallbackWarning)
                    others = [part_of(fakes, share) for share in _SMALLER]
                    for other in (*others, fakes):
                        _take_other(loop, other, tracker, allocator, fakes)
            except Exception:  # whatever the user's code says of a batch of another size
                return asked
            return allocator.asked(len(others) + 1)

    return _counting_transients(module, inputs, step, True, once)


def _counting_transients(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    probe: bool,
    once: Callable[[Transients | None], T],
    look: Callable[[Transients], None] | None = None,
) -> T:
    """What ``once`` gives for what operators take, again once that was measured.

    ``look`` meets most operators in less time, for when none was measured yet and ``once`` takes as long each time.
    """
    tensors = [*tensors_of(module), *inputs.tensors()]
    if any(tensor.is_cuda for tensor in tensors) and not torch.cuda.is_available():
        # Autograd on fake CUDA tensors ends the process there.
        raise UsageError(
            "The model is on CUDA but PyTorch finds no CUDA device; move the model and its inputs to the CPU."
        )
    with preserved_rng(tensors):
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
        transients = step.target.transients(device, probe)
        if transients is not None and transients.empty and look is not None:
            look(transients)
            transients.probe()
        found = once(transients)
        return once(transients) if transients is not None and transients.probe() else found


@contextmanager
def _on_fakes(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    allocator: Allocator | None,
    written: Written | None,
    twins: Twins | None = None,
) -> Iterator[tuple[nn.Module, Inputs, Targets]]:
    """The fake twin of a module, its inputs and the targets, where the step runs on them."""
    targets = step.targets(module, inputs)
    try:
        if any(map(is_sparse_or_nested, targets.all)):
            raise NoDataError("how much a sparse tensor holds")
        with (
            put_back([*targets.buffers, *step.stepped_beside]),
            surroundings_put_back((), step.loss_fn),
            step.target.optimizer_kernels(),
            _sharding(step, module, device_type(module, inputs)) as shard,
            on_fakes(module, inputs, step.target, True, written, twins) as (twin, fakes),
            TrueResults(step.target),
            room_simulated(lambda wanted: None if allocator is None else allocator.make_room(wanted)),
            _handed_on(step, module, twin) as own,
        ):
            given = [*fakes.tensors(), *twin.parameters()]
            shard(twin)
            held = (targets.of_batch, targets.fixed, targets.beside)
            of_batch, fixed, beside = (fakes_of(tensors, given) for tensors in held)
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
        parts.update([key] if gradient.untyped_storage().nbytes() != gradient.nbytes else [])

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


def run_tracked(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    transients: Transients | None = None,
    steps: int = 2,
    attribute: bool = False,
    allocator: Allocator | None = None,
    libraries: int = 0,
    targets: Targets | None = None,
    both: bool = False,
    noted: Noted | None = None,
) -> Timeline:
    """Run ``steps`` steps on the module itself, real or fake, and count the storages on its device type.

    With an ``allocator`` the peak and the bytes reserved are those of more steps like the last, once these take no
    more; among them the ``libraries`` bytes that cuBLAS asks it for at the first products. ``targets`` are by default
    those of the step. ``both`` counts by what is asked for besides. Fake passes are counted by what is ``noted`` of
    them.
    """
    places = Places(module) if attribute or (noted is not None and notable(step, inputs)) else None
    kind, targets = device_type(module, inputs), step.targets(module, inputs) if targets is None else targets
    trackers = [Tracker(kind, transients, places, step.target, allocator)]
    trackers += [Tracker(kind, transients, None, step.target)] * both
    with places.followed() if places else nullcontext():
        loop, recorders = _taken(module, inputs, step, trackers, steps, libraries, targets, noted)
    stand = [(each.categories(), each.current, each.events[:]) for each in trackers]
    trackers[0].blocks = None  # what dies from here on was counted
    loop.release()
    found = [
        _timeline(recorder, *at_end, attribute, libraries) for recorder, at_end in zip(recorders, stand, strict=True)
    ]
    timeline = replace(found[0], asked_for=found[1] if both else None)
    if allocator is None:
        return timeline
    highest = allocator.highest
    reserved = allocator.settle()
    return with_rests(replace(timeline, reserved=reserved), allocator.highest - highest)


def _taken(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    trackers: Sequence[Tracker],
    steps: int,
    libraries: int,
    targets: Targets,
    noted: Noted | None,
) -> tuple[Running, list[Recorder]]:
    """The loop after so many steps under ``trackers``, and what was recorded of each."""
    apart = parameters_apart(step, module, inputs)
    for each in trackers:
        register_given(each, module, inputs, targets, apart)
    sent = communicated(trackers[0], module)
    begun = step.shortest(), module, inputs, step.make_optimizer(module), targets, sent
    fake = _on_plain_fakes(module, step)
    note = noted is not None and fake and notable(step, inputs)
    loop = Noting(noted, trackers, *begun) if noted is not None and note else Running(*begun)
    for each in trackers:
        each.register(loop.batches, INPUTS)
        if loop.average is not None:
            register_apart(each, loop.average.of_parameters, AVERAGE, apart)
            each.register(loop.average.tensors, AVERAGE)
    recorders = [Recorder(each, loop, library_requests(libraries, step.mode), apart) for each in trackers]
    sharded = seen_by(trackers[0]) if isinstance(step.mesh, Fsdp | Tp) else nullcontext()
    again = _repeating(trackers) if fake else nullcontext()
    one_device = device_type(module, inputs) == "cpu"  # where the host is simulated on what stands for the other one
    copies = copies_seen(trackers[0]) if apart and one_device else nullcontext()
    with step.target.around(module), sharded, copies, again:
        for number in range(1, steps + 1):
            take_step(loop, recorders, number)
    return loop, recorders


@contextmanager
def _repeating(trackers: Sequence[Tracker]) -> Iterator[None]:
    """What does the same again for the memory is counted without running."""
    with repeated(trackers), updates_repeated(trackers):
        yield


def _on_plain_fakes(module: nn.Module, step: Step) -> bool:
    """Whether what runs is fake, and counts by operators alone."""
    fake = all(isinstance(parameter, FakeTensor) for parameter in module.parameters())
    return fake and step.mesh is None and not step.target.fuses


def _timeline(
    recorder: Recorder,
    categories: dict[str, int],
    held: int,
    events: list[tuple[int, str]],
    attribute: bool,
    libraries: int,
) -> Timeline:
    """What was recorded; ``categories``, ``held`` and ``events`` are the tracker's as the last step ended."""
    tracker = recorder.tracker
    return Timeline(
        recorder.peaks[-1],
        recorder.peaks[0],
        tuple(recorder.phases),
        categories,
        events,
        recorder.floor,
        max(recorder.peaks) + (libraries if tracker.multiplied else 0),
        tracker.multiplied,
        held - tracker.current,
        tracker.peak_event,
        tracker.lives() if attribute else (),
        tuple(tracker.modules) if attribute else (),
    )


def _take_other(loop: Running, other: Inputs, tracker: Tracker, allocator: Allocator, usual: Inputs) -> None:
    """A step on other inputs, which come to lie where the allocator has room, as do the usual ones when they return."""
    allocator.record()
    tracker.exchange(usual.tensors(), [tensor.nbytes for tensor in other.tensors()])
    loop.inputs = other
    with tracker:
        loop.take()
