"""What compiled graphs take, read off their own code: it runs on fake tensors, and every storage is counted.

That tells what no plan of nodes foresees: the order that Inductor runs kernels in, what it fuses and writes over, the
memory formats that it chooses, what the calls of libraries take in these, and the blocks that CUDA's caching allocator
hands out for all of it. It takes a moment and no device memory.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memrewrite.records.errors import first_line
from memrewrite.simulate.memory.counted import Birth, Counted, Log, Stand, by_cublas
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.allocator import allocator_on, rounded
from memrewrite.targets.layout import Layout
from memrewrite.targets.transients import NOTHING, transients_on
from memrewrite.torch_internals.compiled_code import Buffers, CompiledCode, Written
from memrewrite.torch_internals.dispatch_modes import Layer, Recall
from memrewrite.torch_internals.fake_tensors import FakeTensorMode

_GRADIENT = "tangents"  # what the names of the gradients begin with that backward is given


@dataclass(frozen=True)
class Seen:
    """The peaks in bytes of the forward and the backward code of a graph, besides what lives anyway.

    Of backward what is kept for it counts, the gradients that it is given, and outputs of forward, which may be held;
    where they are, those of the step before count in forward.
    By how much blocks are larger than the inputs, parameters, buffers and optimizer state in them counts for both.
    ``biases`` says that a product may add one; ``given_out`` are the bytes of outputs that the caller keeps, and
    ``kept`` those of what forward makes and is kept for backward.
    """

    forward: int
    backward: int
    biases: bool = True
    given_out: int = 0
    has_backward: bool = True
    kept: int = 0


def seen(
    codes: Sequence[CompiledCode], state: Sequence[int] = (), held: bool = False, layout: Layout = ()
) -> Seen | str:
    """The peaks of a graph's codes, or in words why they cannot be told, "" where none was compiled.

    ``state`` has the bytes of each tensor that the optimizer keeps; ``held`` as in ``facts``, ``layout`` in
    ``Resident``.
    """
    if not codes:
        return ""
    if sorted(code.is_backward for code in codes) not in ([False], [False, True]):
        return "it is not one forward and one backward"
    if any(code.arguments is None for code in codes):
        return "it is not in Python"
    forward, *backward = sorted(codes, key=lambda code: code.is_backward)
    try:
        return _counted(forward, backward[0] if backward else None, state, held, layout)
    except Exception as error:  # whatever stands in the code; the graph itself is as good as ever
        return f"it does not run on fake tensors ({type(error).__name__}: {first_line(error)})"


def _counted(
    forward: CompiledCode, backward: CompiledCode | None, state: Sequence[int], held: bool, layout: Layout
) -> Seen:
    """The peaks: the code runs once, and what it does is counted once it is known what calls of libraries take."""
    with FakeTensorMode() as mode:
        given = list(forward.named_arguments().values())
    devices = {each.device for each in _tensors(given)}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    table = transients_on(device)
    step = _noted(forward, backward, given, mode, Tracker(device.type, table))
    if table is not None:
        table.probe()
    first, second = _peaks(step, Tracker(device.type, blocks=allocator_on(device.type, layout)), state)
    given_out = step.given_out if held else 0
    return Seen(max(first, 0) + given_out, max(second, 0), step.biases, given_out, backward is not None, step.kept)


@dataclass
class _Step:
    """What a step does to storages: what it is ``given``, and what begins and ends in forward and so on.

    ``there`` and ``given_out`` are the bytes of what it is given and of outputs; ``kept``, ``biases`` as in ``Seen``.
    """

    given: Log = field(default_factory=list)
    forward: Log = field(default_factory=list)
    between: Log = field(default_factory=list)
    backward: Log = field(default_factory=list)
    after: Log = field(default_factory=list)
    there: int = 0
    given_out: int = 0
    kept: int = 0
    biases: bool = False


def _noted(
    forward: CompiledCode, backward: CompiledCode | None, given: list[Any], mode: FakeTensorMode, tracker: Tracker
) -> _Step:
    """What they do, on fake tensors of a mode and as a tracker sees it."""
    step, recall = _Step(), Recall(mode)
    buffers = Buffers(recall, functools.partial(_tell, tracker))
    storages = {each.untyped_storage() for each in _tensors(given) if each.device.type == tracker.device_type}
    step.there = sum(rounded(each.nbytes()) for each in storages)
    with mode, recall, Written(), tracker, _Products() as products:
        tracker.log = step.given
        _begin(tracker, given)
        tracker.log = step.forward
        outputs = forward.run([*given], buffers)
        tracker.log = step.between
        if backward is not None:
            with tracker.looking_away():
                named = backward.named_arguments()
            arguments, results = _handed_on(outputs, named)
            step.given_out = _bytes_beside(given, results)
            kept = [each for name, each in zip(named, arguments, strict=True) if not name.startswith(_GRADIENT)]
            step.kept = _bytes_beside(given, kept)
            results += [each for name, each in named.items() if name.startswith(_GRADIENT)]  # autograd holds them
            del outputs, named, kept
            _begin(tracker, arguments)
            tracker.log = step.backward
            made = backward.run(arguments, buffers)
            del results
            tracker.log = step.after
            del made
    tracker.log = None
    step.biases = products.biases
    return step


def _begin(tracker: Tracker, tensors: list[Any]) -> None:
    """From here on those storages of tensors count, too, that did not before."""
    for each in _tensors(tensors):
        if not tracker.counts(each):
            _tell(tracker, each)


def _tell(tracker: Tracker, made: Tensor) -> None:
    """Count the storage of a tensor that no operator of the tracker's made."""
    if made.device.type == tracker.device_type:
        storage = made.untyped_storage()
        tracker.repeat(None, [Birth(storage, storage.nbytes(), False)], NOTHING, None)


def _peaks(step: _Step, tracker: Tracker, state: Sequence[int]) -> tuple[int, int]:
    """Those of forward and backward in bytes beyond what is there, where it matters those of a second step.

    Optimizer state is made between the two steps, where the first one left room.
    """
    there, living = step.there, dict[int, Stand]()
    with tracker:
        _repeat(step.given, tracker, living)
        if tracker.blocks is not None:
            tracker.blocks.record()
            _peaks_of_one(step, tracker, living)
            there -= sum(tracker.blocks.allocate(size).size - rounded(size) for size in state)
            _repeat(step.after, tracker, living)
        forward, backward = _peaks_of_one(step, tracker, living)
    return forward - there, backward - there


def _peaks_of_one(step: _Step, tracker: Tracker, living: dict[int, Stand]) -> tuple[int, int]:
    """The peaks of forward and backward of a step, of which the gradients stay."""
    tracker.reset_peak()
    _repeat(step.forward, tracker, living)
    forward = tracker.peak
    _repeat(step.between, tracker, living)
    tracker.reset_peak()
    _repeat(step.backward, tracker, living)
    return forward, tracker.peak


def _repeat(log: Log, tracker: Tracker, living: dict[int, Stand]) -> None:
    """Count what is in a log; ``living`` stand for the storages in it that there are."""
    for entry in log:
        if isinstance(entry, Counted):
            del living[id(entry)]
            continue
        living.update((id(block), Stand()) for block in entry.made)
        births = [Birth(living[id(block)], block.nbytes, False) for block in entry.made]
        tracker.repeat(entry.func, births, entry.taken, None)
        del births


class _Products(Layer):
    """Notes whether one of the operators may be a product that adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.biases = self.biases or _may_add_a_bias(func, args)
        return self.below(func, types, args, kwargs or {})


def _may_add_a_bias(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator may be a product with a bias, or have one in it; ours are given theirs."""
    if func.namespace == "aten":
        return by_cublas(func) and func.overloadpacket not in (torch.ops.aten.mm, torch.ops.aten.bmm)
    if func.namespace == "memrewrite":
        return any(each.dim() == 1 and each.is_floating_point() for each in _tensors(args))
    return func.namespace not in ("prim", "prims", "inductor")


def _bytes_beside(given: list[Any], results: list[Any]) -> int:
    """Those of the storages that results lie in, and nothing that was given."""
    there = {each.untyped_storage() for each in _tensors(given)}
    return sum(rounded(each.nbytes()) for each in {each.untyped_storage() for each in _tensors(results)} - there)


def _handed_on(outputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The arguments of backward, of which forward's last tensors are those that are kept, and its other outputs."""
    comes = [name for name, each in named.items() if isinstance(each, Tensor) and not name.startswith(_GRADIENT)]
    made = [each for each in outputs if isinstance(each, Tensor)]
    kept = dict(zip(comes, made[len(made) - len(comes) :], strict=True))
    for name, each in kept.items():
        if each.shape != named[name].shape:
            raise ValueError(f"{name} has shape {tuple(named[name].shape)}, and what is kept {tuple(each.shape)}")
    return [kept.get(name, each) for name, each in named.items()], made[: len(made) - len(comes)]


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]
