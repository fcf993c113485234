"""The stages of ``optimize``, one after the other: each takes a candidate and gives another one."""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from memrewrite.advice import infeasible
from memrewrite.capture.returned import lazily, loss_alone
from memrewrite.codegen.writer import generate
from memrewrite.costs.profile import profile_on
from memrewrite.measurement.ahead import copied_ahead
from memrewrite.measurement.original import blaming, original_simulated
from memrewrite.observe.effects import observe
from memrewrite.optimizing.by_size import when_written
from memrewrite.optimizing.foresight import foresee_in, held
from memrewrite.optimizing.proof import Proof, prove
from memrewrite.optimizing.request import Request
from memrewrite.process.frames import in_one_chunk
from memrewrite.process.garbage import sought_as_before, sought_seldom
from memrewrite.records.options import Budget
from memrewrite.records.outcomes import Measured
from memrewrite.records.ranges import Range
from memrewrite.records.report import Report
from memrewrite.report.assembly import report_on
from memrewrite.report.later import complete_by
from memrewrite.runtime.dropin import Returns
from memrewrite.search import registry
from memrewrite.search.asked import Unmet
from memrewrite.search.bench import Bench
from memrewrite.search.candidate import Candidate, CandidateRegion
from memrewrite.search.fit_to_budget import fit_to_budget, limit_for
from memrewrite.search.graphs import ObservedGraph
from memrewrite.search.inplace import marked_inplace
from memrewrite.search.planning import rewritten, rewritten_lower, rewritten_slower, telling_of_attention
from memrewrite.search.regions import Regions, find
from memrewrite.search.so_far import Offer, best_so_far
from memrewrite.simulate import Timeline, layout_for
from memrewrite.targets.kernels_ahead import compiling_ahead
from memrewrite.torch_internals.autograd_nodes import acting_hooks
from memrewrite.workload.hooks import with_hooks_of, without_hooks
from memrewrite.workload.parts import told_of_parts
from memrewrite.workload.sharding import bucket_notes
from memrewrite.workload.step import Inputs, Step, default_loss, device_of
from memrewrite.workload.surroundings import surroundings_put_back
from memrewrite.workload.workload import Workload, refuse_laid_out, refuse_meta

_HOOKED = (
    "What hooks do with the gradient of {name} (register_hook, register_post_accumulate_grad_hook) is no part of the "
    "step: an optimizer that steps in them has its state beside what is predicted."
)
_SOONER = "Nothing had to be rewritten: written out as a program, the model lets go of values sooner."
_REAL = "The peak is that of real steps on the example, as tensors without data cannot take them: others may take more."
_NOT_WHOLE = "returns={!r} has no effect but on the training step of a model that is captured whole."
_RETURNED_ALL = "returns={!r} has no effect: the step would take more so, and the model is returned as it is."
_NOT_STRICT = "strict has no effect: the model fits as it is, is returned as it is, and takes any call."
INTERRUPTED = "Planning was interrupted; this is the best plan of those that were tried until then."
Progress = Callable[[str], None]


def declined(peak: int) -> bool:
    """The answer of nobody to an ``Offer``."""
    return False


@dataclass(frozen=True)
class Outcome:
    """What came of a request: the result, which is the model itself where nothing is gained, and its report.

    ``bench`` is where results are simulated; ``captured`` gives the programs that the graphs were before any rewrite,
    by the path of their region; ``proof`` is None where nothing was verified.
    """

    module: nn.Module
    report: Report
    bench: Bench
    captured: Callable[[], dict[str, str]]
    rewritten: bool
    proof: Proof | None = None

    @property
    def original(self) -> Bench:
        """Where the original is simulated."""
        return replace(self.bench, step=replace(self.bench.step, target=self.bench.target.of_original))


@in_one_chunk
@sought_seldom()
def run(work: Workload, asked: Request, progress: Progress, offer: Offer = declined) -> Outcome:
    """Carry out a request; raises what ``optimize`` says.

    Where planning is interrupted, ``offer`` is asked whether the best plan so far, if there is one, will do: that is
    then verified like any other.
    """
    refuse_meta(work.inputs, work.model)
    refuse_laid_out(work.inputs, work.model)
    work, ranges = asked.placed(work)
    bare = replace(work, model=without_hooks(work.model))
    limit = limit_for(asked.budget, asked.reserved, work.step.device_type(bare.model, work.inputs))
    progress("simulate")
    device, step = device_of(bare.model, work.inputs), _from_here(work.step, bare.model, work.inputs)
    workspace = step.target.workspace_bytes(device, step.amp, step.mode)
    with compiling_ahead(device) if step.mesh is None and registry.compiles(asked.names) else nullcontext():
        with original_simulated(bare.model, work.inputs, step, workspace) as simulated:
            progress("capture")
            found = _found(bare, step, asked, ranges)
            before = simulated()
        bench = Bench(bare.model, work.inputs, asked.rewritten(step), workspace, profile_on(device))
        candidate = _first(bench, found, progress)
        progress("rewrite")
        candidate, measured = _rewritten(candidate, limit, before, asked, progress, offer)
    candidate, after = _simulated(candidate)
    bound = 0 if limit is None else limit.resolve(limit.of(before)) or 0
    if not candidate.modified:
        if limit is None or limit.of(before) <= max(bound, limit.of(after)):
            candidate = candidate.noted(_NOT_STRICT) if asked.strict else candidate
            return _unchanged(work, candidate, limit, before, measured)
        candidate = candidate.noted(_SOONER)
    if after.peak > before.peak and measured is None:
        candidate = candidate.noted(_NOT_STRICT) if asked.strict else candidate
        return _unchanged(work, _returning_all(candidate, asked.returns), limit, before, None)
    if limit is not None:
        candidate = held(candidate.promising(bound or limit.of(after), asked.strict), limit)
    result = candidate.build()
    foresee_in(result, bench.step, bench.workspace, limit, bench.inputs)
    proof = None
    if asked.verify:
        progress("verify")
        with sought_as_before(), blaming(bare.model):  # for whatever shapes alone do not tell
            proof = prove(candidate, result, asked.seed, asked.exact)
    progress("report")
    verdict = None if proof is None else proof.verdict
    report = report_on(candidate, result, limit, before, candidate.attributed(), verdict, measured)
    with_hooks_of(work.model, result)
    complete_by(report, when_written(result))
    return Outcome(result, report, bench, lambda: _captured(candidate), True, proof)


def _found(bare: Workload, step: Step, asked: Request, ranges: Sequence[Range]) -> Regions:
    """What is captured of the model, returning what it is asked to."""
    found = find(bare.model, bare.inputs, step, asked.regions_in(bare), ranges)
    if asked.returns != "all":
        with surroundings_put_back((), step.loss_fn):
            found = _returning(asked, found, step)
    return found


def _simulated(candidate: Candidate) -> tuple[Candidate, Timeline]:
    """The candidate, which tells where its step was a real one, and the timeline of that."""
    after = candidate.simulate()
    return candidate.noted(_REAL) if after.real else candidate, after


def _from_here(step: Step, model: nn.Module, inputs: Inputs) -> Step:
    """The step from what lies on the device now, before planning puts anything beside it."""
    if step.device_type(model, inputs) == "cuda":
        gc.collect()  # what is garbage would pass for something else that lies there
    return replace(step, layout=layout_for(step, model, inputs))


def _told_of_hooks(model: nn.Module) -> tuple[str, ...]:
    """What to say where parameters have hooks for their gradients, which no step here calls."""
    names = [name for name, parameter in model.named_parameters() if acting_hooks(parameter)]
    return (_HOOKED.format(name=names[0]),) if names else ()


def _captured(candidate: Candidate) -> dict[str, str]:
    regions = (region.region for region in candidate.regions)
    return {region.path: generate(region.captured, region.prefix)[0] for region in regions}


def _returning(asked: Request, found: Regions, step: Step) -> Regions:
    """What was captured, returning what it is to, where that is the whole model in a training step."""
    whole, *others = found.found
    if whole.path or step.mode != "train":
        return replace(found, notes=(*found.notes, _NOT_WHOLE.format(asked.returns)))
    captured, loss_of = whole.captured, step.loss_fn or default_loss
    if asked.returns == "loss":
        captured = loss_alone(captured, loss_of)
    else:
        effects = partial(observe, captured.graph_module, whole.example, step.amp, target=step.target)
        captured = lazily(captured, loss_of, effects, registry.in_rows(asked.names, asked.exact))
    told = captured.notes[len(whole.captured.notes) :]
    return replace(found, found=(replace(whole, captured=captured), *others), notes=(*found.notes, *told))


def _returning_all(candidate: Candidate, returns: Returns) -> Candidate:
    """The candidate with every rewrite dropped, whose model returns all that it does."""
    candidate = candidate.abandoned()
    if all(region.region.captured.returns == "all" for region in candidate.regions):
        return candidate
    told = {note for region in candidate.regions for note in region.region.captured.notes[-1:]}
    kept = replace(candidate, notes=tuple(note for note in candidate.notes if note not in told))
    return kept.noted(_RETURNED_ALL.format(returns))


def _rewritten(
    candidate: Candidate,
    limit: Budget | None,
    before: Timeline,
    asked: Request,
    progress: Progress,
    offer: Offer,
) -> tuple[Candidate, Measured | None]:
    """The candidate within its limit, and what was measured of it; raises ``BudgetInfeasibleError``."""
    candidate = telling_of_attention(rewritten(candidate, asked.names, asked.exact), before.peak)
    names = registry.allowed(asked.names, asked.exact)
    if limit is None:
        return marked_inplace(_with_named(candidate, names), names), None
    progress("plan")
    original = limit.of(before)
    bench = candidate.bench
    try:
        with copied_ahead(bench.model) if bench.on_cuda else nullcontext():  # which is measured
            found = fit_to_budget(candidate, limit, original, names)
    except KeyboardInterrupt:
        best = best_so_far(candidate, limit, original, names, offer)
        if best is None:
            raise
        return best.candidate.noted(INTERRUPTED), best.measured
    if isinstance(found, Unmet):
        raise infeasible(found.candidate, limit, limit.resolve(original) or 0, found.lowest, original)
    return found.candidate, found.measured


def _with_named(candidate: Candidate, names: tuple[str, ...] | None) -> Candidate:
    """After the rewrites for a lower peak that are named one by one: no budget says whether they are needed."""
    if names is None or set(names) >= set(registry.NAMES):
        return candidate
    return rewritten_slower(rewritten_lower(candidate, names, wide=True), names)


def _first(bench: Bench, found: Regions, progress: Progress) -> Candidate:
    """The model as it was captured; its bench knows what a step of it takes where its nodes can be timed."""
    regions = tuple(
        CandidateRegion(
            ObservedGraph(region, bench.step, region.captured.graph_module),
            arithmetic_changed=region.captured.loss_in_rows,
        )
        for region in found.found
    )
    alone = bench.step.mode == "train" and bench.step.mesh is None
    hooks = () if bench.step.in_backward else _told_of_hooks(bench.model)  # which are those of such an optimizer
    parts = told_of_parts(bench.step, bench.model, bench.inputs)
    notes = (*found.notes, *(bucket_notes(bench.model) if alone else ()), *hooks, *parts)
    candidate = Candidate(bench, regions, notes, found.left)
    if bench.profile is None:
        return candidate
    progress("profile")
    return replace(candidate, bench=replace(bench, original=candidate.times()))


def _unchanged(
    work: Workload, candidate: Candidate, limit: Budget | None, before: Timeline, measured: Measured | None
) -> Outcome:
    """The model as it is, because nothing is gained."""
    model = candidate.bench.model
    report = report_on(candidate, model, limit, before, before, None, measured)
    return Outcome(work.model, report, candidate.bench, lambda: _captured(candidate), False)
