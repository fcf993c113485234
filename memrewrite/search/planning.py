"""Rewrites and plans that are made of candidates, all on fake tensors; none of them is better or worse yet."""

import functools
import math
from dataclasses import dataclass, replace
from itertools import islice

from memrewrite.capture.normal import is_below
from memrewrite.capture.origin import origin
from memrewrite.passes import early_casts
from memrewrite.passes.written_attention import written_attention
from memrewrite.plan.refine import Fitted, Search
from memrewrite.plan.segments import Chain, Plan
from memrewrite.plan_facts.chain import chain, join, node_of, with_more
from memrewrite.plan_facts.nested import nest
from memrewrite.records.mesh import Fsdp
from memrewrite.records.options import format_bytes
from memrewrite.runtime.fused import has_triton
from memrewrite.search import registry
from memrewrite.search.bench import Bench, Tried
from memrewrite.search.candidate import Candidate, CandidateRegion
from memrewrite.simulate import Timeline
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.spread import local_part

# Below it, reading and writing the gradient of a head takes longer than multiplying for it: two bytes of each read and
# written (4 bytes) for 2 x rows operations, where an H100 does 700e12 a second and moves 3.35e12 bytes (NVIDIA's data).
_WIDE = 512
_MUCH = 0.1  # of a peak
_WRITTEN_OUT = (
    "Attention is written out {times}, first in {where}, where it makes {scores} of scores several times; "
    "F.scaled_dot_product_attention makes none of them, in less time on CUDA."
)


@dataclass(frozen=True)
class Planned:
    """A candidate with the segments of the plan that was fitted; ``in_turn`` as in ``Candidate.with_segments``.

    ``given_up`` says that no other plan was looked for, because the peak of this one is hopeless.
    """

    candidate: Candidate
    fitted: Fitted
    in_turn: bool = False
    given_up: bool = False


def rewritten(candidate: Candidate, names: tuple[str, ...] | None, exact: bool) -> Candidate:
    """After functionalization and the pattern rewrites asked for (all when ``names`` is None)."""
    for_cuda = _compiles(candidate.bench)
    asked = registry.ON_REQUEST.keys() & set(names or ())
    if asked and not for_cuda and candidate.bench.on_cuda and not candidate.bench.target.fuses:
        candidate = candidate.noted("No chains are fused: triton, which torch.compile needs, is not installed.")
    return _of_rows(candidate, names, wide=True).after(registry.patterns(names, exact, for_cuda))


def telling_of_attention(candidate: Candidate, peak: int) -> Candidate:
    """The candidate with a note where attention that the model writes out makes much of a peak of so many bytes."""
    if candidate.bench.target.fuses:
        return candidate
    found = [each for region in candidate.regions for each in written_attention(region.effects) if each.is_worth_it]
    kept = (sum if candidate.bench.step.mode == "train" else max)([0, *(each.scores for each in found)])
    if kept < _MUCH * peak:
        return candidate
    most, times = max(found, key=lambda each: each.scores), "once" if len(found) == 1 else f"{len(found)} times"
    scores, where = format_bytes(most.scores), origin(most.softmax)
    return candidate.noted(_WRITTEN_OUT.format(times=times, where=where, scores=scores))


def _of_rows(candidate: Candidate, names: tuple[str, ...] | None, wide: bool) -> Candidate:
    """With a loss of outputs that are not there made as one in the model is by ``linear_cross_entropy``."""
    fused = _compiles(candidate.bench) and registry.compiles(names)
    return candidate.each(lambda region: region.making_rows(_WIDE if wide else 0, fused))


def _compiles(bench: Bench) -> bool:
    """Whether parts of a step can be compiled for where it is planned for; where there is a GPU, that takes triton."""
    there = not bench.on_cuda or has_triton()
    return bench.device == "cuda" and not bench.target.fuses and there


def rewritten_slower(candidate: Candidate, names: tuple[str, ...] | None) -> Candidate:
    """After the rewrites that cost time, for a peak that is above the budget without them."""
    return candidate.after(registry.slower(names))


def rewritten_lower(candidate: Candidate, names: tuple[str, ...] | None, wide: bool) -> Candidate:
    """After the rewrites for a peak that no plan without them reaches.

    ``wide`` has them work on so many rows at a time that a product takes the time of its multiplications.
    """
    passes = registry.lower(names, _WIDE if wide else 0, _compiles(candidate.bench))
    return _of_rows(candidate, names, wide).after(passes)


def rewritten_lowest(candidate: Candidate, names: tuple[str, ...] | None) -> Candidate:
    """After those for a peak that no plan reaches with all others, of as many rows at a time as ``wide`` ones."""
    return candidate.after(registry.lowest(names, _WIDE))


def plan(
    candidate: Candidate, budget: int, spare: int = 0, in_turn: bool = False, hopeless: float = math.inf
) -> Planned:
    """Segments for which the simulated peak is within ``budget`` bytes, those of the lowest peak where none does.

    One plan over all regions in the order they run. ``spare`` bytes are left for what forward and backward take
    besides; the peak in the result is with them. ``hopeless`` is as in ``Search.fit``.
    """
    given = candidate
    if candidate.bench.step.amp is not None and _exceeds(candidate, budget, spare):
        candidate = _with_casts(candidate)
    if _is_hopeless(candidate, budget, spare, hopeless):
        return Planned(given, Fitted(Plan(), _usual(given).peak, False), in_turn, given_up=True)
    fitted = search(candidate, False, spare, in_turn).fit(budget, hopeless)
    planned = candidate.with_segments(fitted.plan, in_turn)
    if not fitted.fits and fitted.peak > hopeless:
        return Planned(planned, fitted, in_turn, given_up=True)
    if planned.peak(spare) != fitted.peak:
        fitted = search(candidate, True, spare, in_turn).fit(budget, hopeless)
        planned = candidate.with_segments(fitted.plan, in_turn)
    if candidate.bench.target.on_demand and not (fitted.fits or in_turn):
        return Planned(candidate.with_segments(fitted.plan, in_turn=True), fitted, True)
    return Planned(planned, fitted, in_turn)


def _is_hopeless(candidate: Candidate, budget: int, spare: int, hopeless: float) -> bool:
    """Whether one node alone takes more than ``hopeless`` bytes, unless the candidate is known to be in the budget."""
    if hopeless == math.inf or (candidate.bench.has_simulated(candidate.programs) and candidate.peak(spare) <= budget):
        return False
    return _one_node_exceeds(candidate, hopeless)


def _one_node_exceeds(candidate: Candidate, size: float) -> bool:
    """Whether one node alone takes more bytes, whatever the plan; nothing is simulated for that."""
    bare = candidate.without_segments()
    usual = _usual(bare)
    return _fixed(bare, usual) + _joined(bare, usual.held).of_one_node > size


def _exceeds(candidate: Candidate, budget: int, spare: int) -> bool:
    """Whether the candidate as it is takes more than the budget, which no plan makes the optimizer's step fit."""
    usual = _usual(candidate)
    clear = usual.peak_of_optimizer > budget or candidate.is_clearly_above(budget, usual, spare)
    return clear or candidate.peak(spare) > budget


def _with_casts(candidate: Candidate) -> Candidate:
    def made() -> tuple[CandidateRegion, ...]:
        return candidate.each(lambda region: region.edited(early_casts.insert)).regions

    return replace(candidate, regions=candidate.bench.remembered("casts", candidate.regions, made))


def promised(candidate: Candidate) -> int:
    """The bytes of the lowest peak for which there is a plan by the estimate alone: no plan is simulated."""
    return search(candidate if candidate.bench.step.amp is None else _with_casts(candidate), exact=False).promised


def promises_below(candidate: Candidate, size: float) -> bool:
    """Whether that is below ``size`` bytes."""
    return not _one_node_exceeds(candidate, size) and promised(candidate) < size


def without_plan(candidate: Candidate, budget: int) -> Planned:
    """What ``plan`` gives when segments are not among the passes asked for."""
    peak = candidate.simulate(blocks=False).peak
    return Planned(candidate, Fitted(Plan(), peak, peak <= budget))


def search(candidate: Candidate, exact: bool, spare: int = 0, in_turn: bool = False) -> Search:
    """The search for plans of these graphs.

    It simulates both steps and the optimizer (``exact``), or only ``rehearse``, with ``spare`` bytes more.
    """
    bare = candidate.without_segments()
    asked = spare, in_turn, bare.programs
    return bare.bench.remembered(exact, asked, lambda: _search(bare, exact, spare, in_turn))


def _search(bare: Candidate, exact: bool, spare: int, in_turn: bool) -> Search:
    bench = bare.bench
    usual = _usual(bare)

    def peak(candidate: Candidate) -> int:
        return candidate.peak(spare) if exact else candidate.rehearse(usual, spare)

    def peak_of(plan: Plan) -> int:
        make = functools.partial(bare.with_segments, plan, in_turn)
        found = peak(make())
        bench.tried.append(Tried(plan, make, found))
        return found

    chains = _joined(bare, usual.held)
    waiting = bench.step.loop.zero_grad == "before backward" and bench.step.gradients_come
    kept = _gradients(bench) if waiting else 0
    chains = replace(chains, left=usual.held + kept)
    least = usual.peak_of_optimizer
    return Search(chains, peak(bare), _fixed(bare, usual), peak_of, least)


def _usual(candidate: Candidate) -> Timeline:
    """The timeline that others are compared with, whatever was simulated for it."""
    return candidate.bench.usual or candidate.simulate(blocks=False)


def _fixed(bare: Candidate, usual: Timeline) -> int:
    """The bytes that no plan moves; gradients come as backward goes."""
    return usual.floor - (_gradients(bare.bench) if bare.bench.step.gradients_come else 0)


def _gradients(bench: Bench) -> int:
    parts = _parts(bench)
    return sum(rounded(local_part(p).nbytes // parts) for p in bench.model.parameters() if p.requires_grad)


def _joined(bare: Candidate, held: int) -> Chain:
    """The graphs of all regions as one chain; ``held`` is what is freed when the loop lets go of the model's output."""
    bench, layout = bare.bench, bare.layout
    if layout is None and bare.regions[0].region.path == "":
        return _chain(bare.regions[0], bench)
    parts = [region for region in bare.regions if region.region.path]
    chains = [_chain(region, bench) for region in parts]  # whose levels do not show the model's output
    chains = [with_more(each, held) for each in chains]
    if layout is None:
        return join([*chains, *_outside(bare)])
    made = {id(p): local_part(p).nbytes for p in bench.model.parameters() if p.requires_grad}
    inside = [{id(p) for p in bench.model.get_submodule(part.region.path).parameters()} for part in parts]
    own = sum(size for key, size in made.items() if not any(key in each for each in inside)) // _parts(bench)
    sizes, called = {}, {}
    remaining = iter(zip(chains, inside, strict=True))
    for node, lengths in layout.parts:
        here = list(islice(remaining, len(lengths)))
        called[node] = [each for each, _ in here]
        sizes[node] = sum(made.get(key, 0) for key in set().union(*(keys for _, keys in here)))
    return nest(_chain(bare.regions[0], bench), called, sizes, own if bench.step.gradients_come else 0)


def _chain(region: CandidateRegion, bench: Bench) -> Chain:
    """The graph of a region as numbers."""
    found = chain(region.effects, region.graph.watermarks, bench.costs(region.effects), bench.target.on_demand)
    return replace(found, gradients=found.gradients // _parts(bench) if bench.step.gradients_come else 0)


def _parts(bench: Bench) -> int:
    """How many processes have a part each of what is kept of a parameter."""
    return bench.step.mesh.size if isinstance(bench.step.mesh, Fsdp) else 1


def _outside(bare: Candidate) -> list[Chain]:
    """What runs between the forward of the last region and its backward, as a node.

    There all regions hold what they keep and the head and the loss take most of what they take, which is observed.
    """
    paths = [region.region.path for region in bare.regions]
    timeline = bare.attributed(blocks=False)
    inside = [module is not None and any(is_below(module, path) for path in paths) for module in timeline.modules]
    second = [i for i, (_, label) in enumerate(timeline.events) if label.startswith("step 2")]
    forward = [i for i in second if inside[i] and timeline.events[i][1].startswith("step 2 forward")]
    if not forward:
        return []
    start = forward[-1]
    end = next((i for i in second if i > start and inside[i]), len(timeline.events))
    sizes = [size for size, _ in timeline.events[start:end]]
    return [node_of(max(sizes) - sizes[0], bare.bench.costs(bare.regions[0].effects).roofline.segment_ms)]


def without_needless_casts(candidate: Candidate) -> Candidate:
    """Without what ``plan`` spelled out and no segment begins with, unless the peak is lower with it."""
    without = with_casts_dropped(candidate)
    if without is candidate or without.simulate(blocks=False).peak > candidate.simulate(blocks=False).peak:
        return candidate
    return without


def with_casts_dropped(candidate: Candidate) -> Candidate:
    """The candidate without them, whatever that does to the peak."""
    return candidate.each(
        lambda region: region.edited(lambda graph, effects: early_casts.drop_needless(graph, region.marks))
    )


def with_inputs_cast(candidate: Candidate) -> Candidate:
    """With inputs cast before the segments that cast them; the candidate itself where none does."""
    return candidate.each(
        lambda region: region.edited(lambda graph, effects: early_casts.insert_for_inputs(graph, effects, region.marks))
    )
