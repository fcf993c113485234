"""Running a model forward once, to see what its submodules are called with and what they give."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from memrewrite.capture import KeptCalls, watch_calls
from memrewrite.measurement.measuring import preserved_state
from memrewrite.process.frames import let_go
from memrewrite.records.ranges import Range
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.fake.fakes import on_fakes
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.dispatch_modes import as_eager
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS
from memrewrite.workload.step import Inputs, Step, autocast, device_type

T = TypeVar("T")
_OF_CHECKPOINTS = "None of the inputs have requires_grad=True"  # of a model's own, where there are no gradients here


def watched(
    model: nn.Module, inputs: Inputs, step: Step, paths: Sequence[str], ranges: Sequence[Range]
) -> Mapping[str, KeptCalls]:
    """How submodules are called; in a mesh on fake tensors, unless they do not tell."""
    if step.mesh is not None:
        try:
            with on_twin(model, inputs, step) as (twin, fakes, run):
                found = watch_calls(twin, fakes, paths, run, ranges)
            return {path: replace(kept, module=model.get_submodule(path)) for path, kept in found.items()}
        except FAKE_TENSOR_ERRORS:
            if step.divides_layers:  # no other process takes part here
                raise
    return with_or_without(
        lambda grad: watch_calls(model, inputs, paths, lambda given: forward_once(model, given, step, grad), ranges)
    )


@contextmanager
def on_twin(
    model: nn.Module, inputs: Inputs, step: Step
) -> Iterator[tuple[nn.Module, Inputs, Callable[[Inputs], None]]]:
    """A fake twin of the model, its inputs, of which small values are known, and what runs it forward on such.

    That takes none of the memory that a model needs which is to be divided among processes, as it is too large for one.
    """

    def run(given: Inputs) -> None:
        with torch.no_grad(), autocast(step.amp, device_type(model, inputs)):
            given.run(twin)

    with (
        preserved_rng([*tensors_of(model), *inputs.tensors()]),
        on_fakes(model, inputs, step.target, these=True) as (twin, fakes),
    ):
        yield twin, fakes, run


def with_or_without(run: Callable[[bool], T]) -> T:
    """What a run gives without gradients, or with them where it takes those."""
    try:
        return run(False)  # keeps no activations, in case all of them do not fit
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a forward that takes gradients or registers hooks on tensors
        let_go(error)
        return run(True)


def forward_once(model: nn.Module, inputs: Inputs, step: Step, grad: bool) -> None:
    """Run the model forward as it is written, on tensors as they are; what that changes is put back."""
    with (
        as_eager(),
        preserved_state(model, inputs),
        torch.set_grad_enabled(grad),
        autocast(step.amp, device_type(model, inputs)),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", _OF_CHECKPOINTS)
        inputs.run(model)
