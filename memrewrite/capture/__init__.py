"""Capture: a module and example inputs become a graph over the module's own parameters.

Two front ends stand behind one seam. ``torch.export`` leads (pre-dispatch training IR, dynamic batch);
where it fails, Dynamo is tried. Hazards that would make either graph silently wrong are refused first, by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from memrewrite.capture import dynamo, exported, hazards, identity
from memrewrite.capture.assigned import not_read
from memrewrite.capture.at_sight import refuse_unseen, refuse_weight_hooks
from memrewrite.capture.autocasts import told_of_regions
from memrewrite.capture.captured import Captured, InputSpec, TensorSpec
from memrewrite.capture.compiled_calls import told_of_compiled
from memrewrite.capture.expressions import unspelled
from memrewrite.capture.held import Held
from memrewrite.capture.kept_calls import KeptCalls, standing_in, watch_calls
from memrewrite.capture.looks import looks_at_tied
from memrewrite.capture.normal import bind, first_dtype, forward_alone, leaf_tensors
from memrewrite.capture.returned import note_sizes
from memrewrite.capture.shared import tied
from memrewrite.capture.sized import refuse_sized
from memrewrite.records.errors import CaptureError, UnfitCallError, first_line
from memrewrite.records.ranges import Range
from memrewrite.runtime.matching import gradients_now, layouts_now, one_tensor
from memrewrite.state.attributes import preserved
from memrewrite.state.function_caches import fakes_forgotten
from memrewrite.torch_internals.fake_tensors import real_rules_on_fake_tensors
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.torch_internals.spread import is_divided
from memrewrite.torch_internals.tracing import tracing_untold
from memrewrite.workload.step import Inputs, autocast, device_type
from memrewrite.workload.surroundings import surroundings_put_back

__all__ = ["Captured", "InputSpec", "KeptCalls", "TensorSpec", "capture", "watch_calls"]

FrontEnd = Callable[[nn.Module, Inputs, Sequence[type], Sequence[Range], Inputs | None, Sequence[Held]], Captured]
FRONT_ENDS: dict[str, FrontEnd] = {
    "export": exported.capture,
    "dynamo": lambda model, inputs, functions, ranges, elsewhere, held: dynamo.capture(model, inputs, held),
}
_RETURNED = r"Found <class '(?:\w+\.)*(\w+)'> in output, which is not a known type"  # export's words
_TOLD = "The model asks whether it is being traced (in {}), and only what it does then could be captured."


def capture(
    model: nn.Module,
    inputs: Inputs,
    front_end: str | None = None,
    amp: torch.dtype | None = None,
    kept: Mapping[str, KeptCalls] = MappingProxyType({}),
    ranges: Sequence[Range] = (),
    elsewhere: Inputs | None = None,
) -> Captured:
    """Capture ``model`` as ``inputs`` call it, in the mode it is in; the model and all random state stay as they are.

    Under autocast to ``amp`` the graph has what the model does then, but not the casts of autocast, which works on the
    graph as it runs. ``front_end`` names one of ``FRONT_ENDS``; by default each is tried in order. The submodules that
    are ``kept``, by path, stay calls in the graph, and sizes in ``ranges`` vary; Dynamo's graphs have neither.
    ``elsewhere`` are inputs of the same kind in another step, tensors in words: sizes that differ vary if they can.
    Raises ``CaptureError`` naming the hazard, or what each front end said.
    """
    _, order = bind(model, inputs)
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    pairs = one_tensor([leaves[i] for i in order])
    refuse_weight_hooks(model, type(model).__name__)  # its own hooks are off while it is looked at

    def traced(kept: Mapping[str, KeptCalls]) -> Captured:
        with (
            preserved(model),
            surroundings_put_back((model,)),
            standing_in(model, kept),
            real_rules_on_fake_tensors(),
            fakes_forgotten(model),
            autocast(amp, device_type(model, inputs)),
            torch.set_grad_enabled(model.training),
        ):
            return _captured(model, inputs, front_end, pairs, ranges, elsewhere, bool(kept))

    found = traced(kept)
    if any(calls.otherwise for calls in kept.values()):
        _refuse_settled(found, kept, traced)
    refuse_unseen(found.graph_module.graph, type(model).__name__)
    refuse_sized(found.graph_module, type(model).__name__)
    note_sizes(found.graph_module.graph)
    with torch.set_grad_enabled(model.training):
        return _with_parameters(found, model, leaf_tensors(model, inputs))


def _with_parameters(found: Captured, model: nn.Module, tensors: Sequence[Tensor]) -> Captured:
    """What is said of all parameters, which stand-ins do not have; ``tensors`` are the inputs."""
    divided = next((name for name, parameter in model.named_parameters() if is_divided(parameter)), "")
    names = tied(model, found.graph_module.graph, found.reads)
    looks = (*found.looks, *looks_at_tied(names))
    return replace(
        found,
        dtype=first_dtype(model),
        divided=divided,
        tied=names,
        looks=looks,
        gradients=None if found.gradients is None else gradients_now(model, tensors),
        layouts=None if found.layouts is None else layouts_now(model, tensors),
    )


def _refuse_settled(
    found: Captured, kept: Mapping[str, KeptCalls], traced: Callable[[Mapping[str, KeptCalls]], Captured]
) -> None:
    """Raise ``UnfitCallError`` where sizes that values decide became numbers: with other sizes it is another graph."""
    with suppress(Exception):  # whatever forward says of these
        other = traced({path: replace(calls, calls=calls.otherwise) for path, calls in kept.items()})
        alike = all(map(torch.equal, found.constants.values(), other.constants.values()))
        if alike and other.graph_module.code == found.graph_module.code:
            return
    path = next(path for path, calls in kept.items() if calls.otherwise)
    raise UnfitCallError(f"{path} gives sizes that values decide, and the graph would keep those of the example.", path)


def _captured(
    model: nn.Module,
    inputs: Inputs,
    front_end: str | None,
    pairs: tuple[tuple[int, int], ...],
    ranges: Sequence[Range],
    elsewhere: Inputs | None,
    with_calls: bool,
) -> Captured:
    findings = hazards.check(model, inputs)
    shared: tuple[tuple[int, int], ...] | None = pairs
    if not findings.identity and not (pairs and identity.asked(model, inputs, findings.operators)):
        inputs, shared = identity.apart(inputs, model), None
    if findings.asks and front_end != "dynamo" and not findings.export_loses:
        # Not told that it is traced, it does what it always does; nothing else is as good, but it may not work.
        with suppress(Exception), tracing_untold(), forward_alone(model):
            found = exported.capture(model, inputs, findings.functions, ranges, elsewhere, findings.held)
            return _with(findings, shared, model, inputs, found)
    names = [front_end] if front_end else ["export"] if ranges or with_calls else [*FRONT_ENDS]
    return _by_front_ends(names, model, inputs, findings, shared, ranges, elsewhere)


def _by_front_ends(
    names: Sequence[str],
    model: nn.Module,
    inputs: Inputs,
    findings: hazards.Findings,
    shared: tuple[tuple[int, int], ...] | None,
    ranges: Sequence[Range],
    elsewhere: Inputs | None,
) -> Captured:
    """What the first front end gives that can; raises ``CaptureError`` with what each said."""
    said: list[str] = []
    for name in names:
        if name == "export" and findings.export_loses:
            said.append(f"export: it loses {findings.export_loses}")
            continue
        if name == "dynamo" and findings.functions:
            said.append("dynamo: it looks into custom autograd.Functions")
            continue
        try:
            with forward_alone(model):
                captured = FRONT_ENDS[name](model, inputs, findings.functions, ranges, elsewhere, findings.held)
        except CaptureError:
            raise
        except Exception as error:  # front ends raise anything; every reason is passed on
            said.append(f"{name}: {type(error).__name__}: {first_line(error)}")
        else:
            told = (_TOLD.format(findings.asks),) if findings.asks else ()
            return _with(findings, shared, model, inputs, captured, *told)
    if returned := re.search(_RETURNED, " ".join(said)):
        raise unspelled(returned[1])
    if findings.derives:
        raise CaptureError(
            f"{type(model).__name__} takes gradients in forward (at {findings.derives}) by operations that no graph "
            "shows; take them outside of forward, in loss_fn say, unless they are by its inputs."
        )
    asked = f" with {', '.join(str(each) for each in ranges if not each.implied)}" if ranges else ""
    raise CaptureError(
        f"{type(model).__name__} cannot be captured as one graph{asked} ({'; '.join(said)}). Control flow that depends "
        "on tensor values has to be written with tensors (torch.where, masks) or moved out of forward."
    )


def _with(
    findings: hazards.Findings,
    shared: tuple[tuple[int, int], ...] | None,
    model: nn.Module,
    inputs: Inputs,
    captured: Captured,
    *told: str,
) -> Captured:
    calls = told_of_compiled(model)
    regions = told_of_regions(model, captured.graph_module.graph)
    return replace(
        captured,
        inputs=replace(captured.inputs, shared=shared),
        notes=(*captured.notes, *findings.notes, *told, *calls, *regions),
        exact=captured.exact and findings.exact and not calls,
        checkpoints=findings.checkpoints,
        autocast=findings.autocast,
        reads=findings.reads,
        looks=findings.looks,
        gradients=() if findings.gradients else None,
        layouts=() if findings.layouts else None,
        types=findings.types,
        assigned=not_read(type(model).__name__, captured, findings.reads),
    )
