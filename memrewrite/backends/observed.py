"""What compiled graphs take, read off their own code: it runs on fake tensors, and every storage is counted.

That tells what no plan of nodes foresees: the order that Inductor runs kernels in, what it fuses and writes over, the
memory formats that it chooses, what the calls of libraries take in these, and the blocks that CUDA's caching allocator
hands out for all of it. It takes a moment and no device memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memrewrite.simulate.memory.counted import by_cublas
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.allocator import allocator_on, rounded
from memrewrite.targets.layout import Layout
from memrewrite.targets.transients import Transients, transients_on
from memrewrite.torch_internals.compiled_code import CompiledCode
from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.fake_tensors import FakeTensorMode

_GRADIENT = "tangents"  # what the names of the gradients begin with that backward is given


@dataclass(frozen=True)
class Seen:
    """The peaks in bytes of the forward and the backward code of a graph, besides what lives anyway.

    Of backward what is kept for it counts, the gradients that it is given, and outputs of forward, which may be held;
    where they are, those of the step before count in forward.
    By how much blocks are larger than the inputs, parameters, buffers and optimizer state in them counts for both.
    ``biases`` says that a product may add one; ``given_out`` are the bytes of outputs that the caller keeps.
    """

    forward: int
    backward: int
    biases: bool = True
    given_out: int = 0


def seen(
    codes: Sequence[CompiledCode], state: Sequence[int] = (), held: bool = False, layout: Layout = ()
) -> Seen | str:
    """The peaks of a graph's codes, or in words why they cannot be told, "" where it has no backward.

    ``state`` has the bytes of each tensor that the optimizer keeps; ``held`` as in ``facts``, ``layout`` in
    ``Resident``.
    """
    if not any(code.is_backward for code in codes):
        return ""
    if sorted(code.is_backward for code in codes) != [False, True]:
        return "it is not one forward and one backward"
    if any(code.arguments is None for code in codes):
        return "it is not in Python"
    forward, backward = sorted(codes, key=lambda code: code.is_backward)
    try:
        return _counted(forward, backward, state, held, layout)
    except Exception as error:  # whatever stands in the code; the graph itself is as good as ever
        return f"it does not run on fake tensors ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"


def _counted(forward: CompiledCode, backward: CompiledCode, state: Sequence[int], held: bool, layout: Layout) -> Seen:
    """The peaks; run again where there are calls that had to be measured."""
    with FakeTensorMode():
        devices = {each.device for each in _tensors(forward.named_arguments().values())}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    table = transients_on(device)
    found = _run(forward, backward, device.type, table, state, layout)
    if table is not None and table.probe():
        found = _run(forward, backward, device.type, table, state, layout)
    return replace(found, forward=found.forward + found.given_out) if held else replace(found, given_out=0)


def _run(
    forward: CompiledCode,
    backward: CompiledCode,
    kind: str,
    table: Transients | None,
    state: Sequence[int],
    layout: Layout,
) -> Seen:
    """The peaks of a second step.

    Optimizer state is made between the two steps, where the first one left room.
    """
    tracker = Tracker(kind, table, blocks=allocator_on(kind, layout))
    with FakeTensorMode() as mode:
        given = list(forward.named_arguments().values())
    storages = {each.untyped_storage() for each in _tensors(given) if each.device.type == kind}
    with mode, tracker, _Products() as products:
        tracker.register(_tensors(given), "inputs")
        there = sum(rounded(each.nbytes()) for each in storages)
        if tracker.blocks is not None:
            tracker.blocks.record()
            gradients: list[Any] = []
            _step(forward, backward, given, tracker, there, gradients)
            there -= sum(tracker.blocks.allocate(size).size - rounded(size) for size in state)
            gradients.clear()
        found = _step(forward, backward, given, tracker, there)
    return replace(found, biases=products.biases)


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


def _step(
    forward: CompiledCode,
    backward: CompiledCode,
    given: list[Any],
    tracker: Tracker,
    there: int,
    gradients: list[Any] | None = None,
) -> Seen:
    """The peaks in bytes beyond ``there``, and the outputs' bytes; what backward gives is put into ``gradients``."""
    tracker.reset_peak()
    outputs = forward.run([*given])
    first = tracker.peak - there
    with tracker.looking_away():
        named = backward.named_arguments()
    arguments, results = _handed_on(outputs, named)
    given_out = _bytes_beside(given, results)
    results += [each for name, each in named.items() if name.startswith(_GRADIENT)]  # autograd holds them
    del outputs, named
    tracker.register(_tensors(arguments), "kept")
    tracker.reset_peak()
    made = backward.run(arguments)
    del results
    if gradients is not None:
        gradients += made
    return Seen(max(first, 0), max(tracker.peak - there, 0), given_out=given_out)


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
