"""Capturing a module for a step: what a graph cannot stand for in it is refused."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from memrewrite.capture import Captured, KeptCalls, capture
from memrewrite.capture.normal import example_of
from memrewrite.codegen.writer import generate
from memrewrite.observe.any_gradient import observe_trained
from memrewrite.observe.effects import observe
from memrewrite.records.errors import CaptureError
from memrewrite.records.ranges import Range
from memrewrite.rewriting.invariants import writes_what_is_kept
from memrewrite.runtime.dropin import build, program_from
from memrewrite.search.repeats import names_of_operators, note_what_repeats
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.fake.fakes import on_fakes
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.workload.step import Inputs, Step, autocast, device_type


def captured_for(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    kept: Mapping[str, KeptCalls] = MappingProxyType({}),
    ranges: Sequence[Range] = (),
    elsewhere: Inputs | None = None,
    once: Collection[str] = (),
) -> Captured:
    """Capture a module on ``inputs``, whose calls to ``once`` are made once.

    Raises ``CaptureError`` also for a graph that cannot stand for it in the step.
    """
    found = capture(module, inputs, amp=step.amp, kept=kept, ranges=ranges, elsewhere=elsewhere)
    found = replace(found, differentiable=step.mode == "train")
    example = example_of(found, module, inputs)
    note_what_repeats(found.graph_module, example, step, once)
    if note := names_of_operators(found.graph_module):
        found = replace(found, notes=(*found.notes, note))
    source, constants = generate(found)
    if step.mode == "train" and found.checkpoints:
        _refuse_writes_of_kept(module, found.graph_module, example, step)
    if step.amp is not None:
        program = build(module, program_from(source), constants)
        try:
            theirs, ours = (_types(each, inputs, step, found.gradients) for each in (module, program))
        except FAKE_TENSOR_ERRORS:  # in a submodule that stays a call: then the numbers alone are verified
            theirs = ours = ""
        if theirs != ours:
            raise CaptureError(
                f"{type(module).__name__} asks for the type of a tensor and returns {theirs} under autocast, where a "
                f"captured graph returns {ours}; name the type in forward, or optimize without amp."
            )
    return found


def _refuse_writes_of_kept(module: nn.Module, graph_module: fx.GraphModule, example: list[Any], step: Step) -> None:
    """The model's own checkpoints lose what autograd would keep; whoever calls the result may ask for any gradient."""
    effects = observe(graph_module, example, step.amp, target=step.target)
    found = writes_what_is_kept(effects)
    for amp in dict.fromkeys((step.amp, None)):  # a copy that autocast keeps survives writes to what it is made of
        with suppress(CaptureError):
            trained = observe_trained(module, graph_module, example, effects, amp, target=step.target)
            found = found or writes_what_is_kept(trained)
    if found:
        raise CaptureError(
            f"{type(module).__name__} writes in place what autograd would keep without the model's own checkpoint."
        )


def _types(module: nn.Module, inputs: Inputs, step: Step, gradients: Sequence[bool] | None) -> str:
    """The types of the tensors that a module returns under autocast, found on fake ones.

    Gradients are on where it asks whether they are, as they were at capture (``gradients_now``).
    """
    with (
        preserved_rng([*tensors_of(module), *inputs.tensors()]),
        on_fakes(module, inputs, step.target) as (twin, fakes),
        torch.set_grad_enabled(gradients is not None and gradients[0]),
        autocast(step.amp, device_type(module, inputs)),
    ):
        output = fakes.run(twin.forward)
    return ", ".join(str(leaf.dtype) for leaf in tensors_in(output))
