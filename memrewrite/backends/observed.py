"""What compiled graphs take, read off their own code: it runs on fake tensors, and every storage is counted.

That tells what no plan of nodes foresees: the order that Inductor runs kernels in, what it fuses and writes over, the
memory formats that it chooses and what the calls of libraries take in these. It takes a moment and no device memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.transients import transients_on
from memrewrite.torch_internals.compiled_code import CompiledCode
from memrewrite.torch_internals.fake_tensors import FakeTensorMode

_GRADIENT = "tangents"  # what the names of the gradients begin with that backward is given


@dataclass(frozen=True)
class Seen:
    """The peaks in bytes of the forward and the backward code of a graph, besides inputs, parameters and buffers.

    Of backward what is kept for it counts, the gradients that it is given, and outputs of forward, which may be held.
    """

    forward: int
    backward: int


def seen(codes: Sequence[CompiledCode]) -> Seen | str:
    """The peaks of a graph's codes, or in words why they cannot be told, "" where it has no backward."""
    if not any(code.is_backward for code in codes):
        return ""
    if sorted(code.is_backward for code in codes) != [False, True]:
        return "it is not one forward and one backward"
    if any(code.arguments is None for code in codes):
        return "it is not in Python"
    forward, backward = sorted(codes, key=lambda code: code.is_backward)
    try:
        return _counted(forward, backward)
    except Exception as error:  # whatever stands in the code; the graph itself is as good as ever
        return f"it does not run on fake tensors ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"


def _counted(forward: CompiledCode, backward: CompiledCode) -> Seen:
    """The peaks; run again where there are calls that had to be measured."""
    with FakeTensorMode():
        devices = {each.device for each in _tensors(forward.named_arguments().values())}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    table = transients_on(device)
    found = _run(forward, backward, Tracker(device.type, table))
    return _run(forward, backward, Tracker(device.type, table)) if table is not None and table.probe() else found


def _run(forward: CompiledCode, backward: CompiledCode, tracker: Tracker) -> Seen:
    with FakeTensorMode() as mode:
        given = list(forward.named_arguments().values())
        named = backward.named_arguments()
    with mode, tracker:
        tracker.register(_tensors(given), "inputs")
        there = tracker.current
        tracker.reset_peak()
        outputs = forward.run([*given])
        first = tracker.peak - there
        arguments, results = _handed_on(outputs, named)
        del outputs, named
        tracker.register(_tensors(arguments), "kept")
        tracker.reset_peak()
        backward.run(arguments)
        del results
        return Seen(max(first, 0), max(tracker.peak - there, 0))


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
