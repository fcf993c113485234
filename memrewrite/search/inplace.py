"""Activations are marked in place last, where that is right whoever calls the result, and lowers the peak."""

from dataclasses import replace

from torch import fx

from memrewrite.observe.any_gradient import observe_trained
from memrewrite.observe.effects import Effects
from memrewrite.passes.inplace_activation import InplaceActivation, is_activation, unsupported
from memrewrite.records.errors import CaptureError
from memrewrite.rewriting.contract import Refused, Result
from memrewrite.search.candidate import Candidate, CandidateRegion

_NAME = InplaceActivation.name


def marked_inplace(candidate: Candidate, names: tuple[str, ...] | None) -> Candidate:
    """Activations in place, once and last, because legality depends on the segments.

    What autograd keeps depends on the call: it is observed as if everything required a gradient and without autocast,
    whose copies would be kept in place of what is marked, so that whoever calls the result may choose; under autocast
    where the program is for no call without. Where that would raise the peak, nothing is marked. ``torch.compile``
    finds for itself what to write in place.
    """
    marked = with_marks(candidate, names)
    if marked.programs == candidate.programs:
        return marked
    if marked.simulate(blocks=False).peak <= candidate.simulate(blocks=False).peak:
        return marked
    return replace(candidate, regions=tuple(map(_unmarked, marked.regions, candidate.regions)))


def with_marks(candidate: Candidate, names: tuple[str, ...] | None) -> Candidate:
    """The candidate with activations in place wherever that is right, whatever that does to the peak."""
    if not candidate.bench.target.writes_in_place or (names is not None and _NAME not in names):
        return candidate
    return candidate.each(_marked)


def _marked(region: CandidateRegion) -> CandidateRegion:
    if _NAME in region.results:
        return region
    if not any(map(is_activation, region.graph.nodes)):
        return region.having(_NAME, Result())  # whatever would be kept
    if all(unsupported(node) for node in region.effects.order if is_activation(node)):
        return region.after(InplaceActivation(region.marks))

    def look(graph_module: fx.GraphModule, effects: Effects, before: Effects | None) -> Effects:
        original, grad = region.region, region.graph.step.mode == "train"
        type_ = original.captured.autocast
        amp = None if type_ == "any" else type_
        return observe_trained(original.module, graph_module, original.example, effects, amp, grad, before=before)

    try:
        return region.after(InplaceActivation(region.marks), look)
    except CaptureError as error:
        where = region.region.path or "(root)"
        return region.having(_NAME, Result((), (Refused(where, f"What would be kept is unknown: {error}"),)))


def _unmarked(marked: CandidateRegion, before: CandidateRegion) -> CandidateRegion:
    """The region before it was marked, with a refusal for each mark."""
    if _NAME in before.results:
        return before
    done = marked.results[_NAME]
    refused = (Refused(each.where, "In place, the peak of the step would be higher.") for each in done.applied)
    return before.having(_NAME, Result((), (*done.refused, *refused)))
