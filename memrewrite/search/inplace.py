"""Activations are marked in place last, where that is right whoever calls the result, and lowers the peak."""

from typing import Any

from memrewrite.observe.any_gradient import observe_trained
from memrewrite.observe.effects import Effects
from memrewrite.passes.inplace_activation import InplaceActivation
from memrewrite.records.errors import CaptureError
from memrewrite.rewriting.contract import Refused, Result
from memrewrite.search.pipeline import Line, Part


def mark_inplace(line: Line, names: tuple[str, ...] | None) -> None:
    """Mark activations in place, once and last, because legality depends on the segments.

    What autograd keeps depends on the call: it is observed as if everything required a gradient and without autocast,
    whose copies would be kept in place of what is marked, so that whoever calls the result may choose.
    Marks that would raise the peak are taken back. ``torch.compile`` finds for itself what to write in place.
    """
    if line.compiled or (names is not None and InplaceActivation.name not in names):
        return
    parts = [part for part in line.parts if InplaceActivation.name not in part.results]
    before = _spellings(parts)
    for part in parts:
        _mark_inplace(part)
    after = _spellings(parts)
    if before == after:
        return
    peak = line.simulate(blocks=False).peak
    _spell(parts, before)
    if peak <= line.simulate(blocks=False).peak:
        _spell(parts, after)
        return
    for part in parts:
        done = part.results[InplaceActivation.name]
        refused = (Refused(each.where, "In place, the peak of the step would be higher.") for each in done.applied)
        part.results[InplaceActivation.name] = Result((), (*done.refused, *refused))


def _mark_inplace(part: Part) -> None:
    effects = part.observe()

    def look() -> Effects:
        return observe_trained(
            part.region.module, part.graph_module, part.region.example, effects, grad=part.step.mode == "train"
        )

    try:
        first = [look()]
    except CaptureError as error:
        part.forget()
        where = part.region.path or "(root)"
        part.results[InplaceActivation.name] = Result((), (Refused(where, f"What would be kept is unknown: {error}"),))
        return
    part.apply(InplaceActivation(), lambda: first.pop() if first else look())


def _spellings(parts: list[Part]) -> list[tuple[Any, ...]]:
    return [(node.target, node.args, node.kwargs) for part in parts for node in part.graph_module.graph.nodes]


def _spell(parts: list[Part], spellings: list[tuple[Any, ...]]) -> None:
    nodes = [node for part in parts for node in part.graph_module.graph.nodes]
    for node, (target, args, kwargs) in zip(nodes, spellings, strict=True):
        node.target, node.args, node.kwargs = target, args, kwargs
    for part in parts:
        part.graph_module.recompile()
