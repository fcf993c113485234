"""A model on its way to its budget: the graphs of its regions, rewritten, and the segments they have been given.

Nothing here is changed: a pass or a plan takes a candidate and gives another one, and to undo it is to keep the first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, fx, nn

from memrewrite.capture.normal import is_below
from memrewrite.costs import Costs
from memrewrite.observe.effects import Effects
from memrewrite.passes.checkpoint_segments import CheckpointSegments
from memrewrite.plan.marks import NO_MARKS, Marks
from memrewrite.plan.segments import Plan
from memrewrite.plan_facts.nested import Layout
from memrewrite.records.errors import InternalError
from memrewrite.rewriting.contract import Applied, Pass, Refused, Result
from memrewrite.rewriting.invariants import broken, health
from memrewrite.runtime.assembled import Written, assembled
from memrewrite.runtime.dropin import Program, program_from
from memrewrite.search.bench import Bench
from memrewrite.search.graphs import ObservedGraph
from memrewrite.search.regions import Region
from memrewrite.simulate import Noted, Timeline
from memrewrite.workload.step import Step

# One pass need not tell the peak of two steps to the byte: it decides where it is so many times the budget.
_CLEAR = 1.05
Look = Callable[[fx.GraphModule, Effects, Effects | None], Effects]
"""Another way to look at a graph, given its effects in the step that is planned for, before passes change it.

The last argument is what was seen before a pass changed it, None the first time.
"""


@dataclass(frozen=True)
class CandidateRegion:
    """One region: its graph as it is now, the marks of a plan, and what each pass did to it."""

    graph: ObservedGraph
    marks: Marks = NO_MARKS
    results: Mapping[str, Result] = field(default_factory=dict)
    arithmetic_changed: bool = False

    @property
    def region(self) -> Region:
        """What was captured."""
        return self.graph.region

    @property
    def effects(self) -> Effects:
        """What each node of the graph does."""
        return self.graph.effects

    def after(self, graph_pass: Pass, look: Look | None = None) -> "CandidateRegion":
        """The region after a pass, which sees what ``look`` sees and is held to what it says about itself."""
        graph_module, effects = self.graph.copied()
        seen = effects if look is None else look(graph_module, effects, None)
        healthy = None if look is None else health(seen)  # of the graph itself it is known afterwards, too
        result = graph_pass(graph_module, seen)
        graph_module.graph.lint()
        changed = not self.graph.is_as(graph_module.graph)
        if changed != result.modified:
            raise InternalError(f"{graph_pass.name} says modified={result.modified}; the graph says {changed}.")
        if not changed:
            if look is None:
                self.graph.left_alone(graph_module, effects)
            return self.having(graph_pass.name, result)
        graph = replace(self.graph, graph_module=graph_module, before=effects)
        after = graph.effects if look is None else look(graph_module, effects, seen)
        if wrongs := broken(healthy or self.graph.health, graph.health if look is None else health(after)):
            raise InternalError(f"The pass {graph_pass.name} broke the graph: {' '.join(wrongs)}")
        result = replace(result, freed=seen.kept - after.kept)
        changed_arithmetic = self.arithmetic_changed or not graph_pass.exact
        return replace(self.having(graph_pass.name, result), graph=graph, arithmetic_changed=changed_arithmetic)

    def edited(self, edit: Callable[[fx.GraphModule, Effects], bool]) -> "CandidateRegion":
        """The region with a graph that ``edit`` changes, or itself where that says it does not."""
        graph_module, effects = self.graph.copied()
        if not edit(graph_module, effects):
            return self
        return replace(self, graph=replace(self.graph, graph_module=graph_module, before=effects))

    def making_rows(self, rows: int, fused: bool) -> "CandidateRegion":
        """The region whose loss of outputs that are not there, if it is, makes so many rows at a time, or is fused."""
        captured = self.region.captured
        lazy = {number: call.of_rows(rows, fused) for number, call in captured.lazy.items()}
        if not captured.loss_in_rows or lazy == captured.lazy:
            return self
        region = replace(self.region, captured=replace(captured, lazy=lazy))
        return replace(self, graph=replace(self.graph, region=region, before=self.effects))

    def having(self, name: str, result: Result) -> "CandidateRegion":
        """The region with ``result`` for what the pass of this name did."""
        return replace(self, results={**self.results, name: result})

    @property
    def written(self) -> tuple[str, dict[str, Tensor]]:
        """The program that the graph is, as source, and the tensors it holds."""
        return self.graph.written(self.marks)

    @property
    def source(self) -> str:
        """The program."""
        return self.written[0]

    @property
    def program(self) -> tuple[Program, dict[str, Tensor]]:
        """The program, ready to run, and the tensors it holds."""
        source, constants = self.written
        return program_from(source), constants


@dataclass(frozen=True)
class Candidate:
    """The regions of a model in the order they run (one, the whole model, wherever that can be captured).

    ``bench`` is where candidates are built, simulated and compared; ``left`` says of parts outside of the regions, by
    path, why they stay as they are.
    """

    bench: Bench
    regions: tuple[CandidateRegion, ...]
    notes: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def results(self) -> dict[str, Result]:
        """What each pass did, over all regions."""
        merged: dict[str, Result] = {}
        for region in self.regions:
            for name, result in region.results.items():
                before = merged.get(name, Result())
                applied, refused = before.applied + result.applied, before.refused + result.refused
                merged[name] = Result(applied, refused, before.freed + result.freed)
        return merged

    @property
    def modified(self) -> bool:
        """Whether any pass did anything, or something is not returned."""
        returned = all(region.region.captured.returns == "all" for region in self.regions)
        return not returned or any(result.modified for result in self.results.values())

    @property
    def arithmetic_changed(self) -> bool:
        """Whether any rewrite computes other bits than the original."""
        return any(region.arithmetic_changed for region in self.regions)

    @property
    def captured_exactly(self) -> bool:
        """Whether every graph, before any rewrite, computes the bits of the original."""
        return all(region.region.captured.exact for region in self.regions)

    def noted(self, note: str) -> "Candidate":
        """The candidate with one more thing to tell."""
        return replace(self, notes=(*self.notes, note))

    def each(self, change: Callable[[CandidateRegion], CandidateRegion]) -> "Candidate":
        """The candidate with every region changed; itself where none is."""
        regions = tuple(map(change, self.regions))
        same = all(new is old for new, old in zip(regions, self.regions, strict=True))
        return self if same else replace(self, regions=regions)

    def after(self, passes: Iterable[Pass]) -> "Candidate":
        """The candidate after these passes, one after the other in each region."""
        done = self
        for graph_pass in passes:
            done = done.each(partial(CandidateRegion.after, graph_pass=graph_pass))
        return done

    def with_segments(self, plan: Plan, in_turn: bool = False) -> "Candidate":
        """The candidate with the segments of a plan over the joined chains of its regions, and no others.

        ``in_turn`` says of code that recomputes on demand that it has to hold fewer tensors there and fuse less.
        """
        regions = []
        for region, part in zip(self.regions, self._parts_of(plan), strict=True):
            statistics = bool(self.bench.normalizations(region.effects))
            segments = CheckpointSegments(part, statistics, self.bench.target.on_demand, in_turn)
            marks, result = segments(region.effects)
            regions.append(replace(region.having(segments.name, result), marks=marks))
        return replace(self, regions=tuple(regions))

    def _parts_of(self, plan: Plan) -> list[Plan]:
        """What of a plan for the joined chain is for each region."""
        if (layout := self.layout) is not None:
            return [layout.own(plan), *layout.of_parts(plan)]
        parts, start = [], 0
        for region in self.regions:
            end = start + len(region.graph.nodes)
            parts.append(plan.part(start, end))
            start = end + 1  # the boundary that `join` puts between regions
        return parts

    @property
    def layout(self) -> Layout | None:
        """Where the nodes of the model lie among those of the other regions, which are calls in it; None without."""
        whole, *others = self.regions
        if whole.region.path or not others:
            return None
        nodes = list(whole.graph.nodes)
        calls = {i: str(node.target) for i, node in enumerate(nodes) if node.op == "call_module"}
        sizes = {
            i: tuple(len(part.graph.nodes) for part in others if is_below(part.region.path, path))
            for i, path in calls.items()
        }
        return Layout(len(nodes), tuple((i, each) for i, each in sizes.items() if each))

    @property
    def room(self) -> int:
        """The bytes that CUDA's allocator gets before the program runs; 0 where it gets them as tensors are made."""
        return self.regions[0].marks.room

    def making_room(self, total: int) -> "Candidate":
        """The candidate for which CUDA's allocator gets ``total`` bytes, and what is left of them in one piece."""
        first = self.regions[0]
        return replace(self, regions=(replace(first, marks=replace(first.marks, room=total)), *self.regions[1:]))

    def telling(self, other: "Candidate") -> "Candidate":
        """The candidate with what passes said that left another one of the same regions as it was, too."""

        def told(mine: CandidateRegion, theirs: CandidateRegion) -> CandidateRegion:
            refused = {name: result for name, result in theirs.results.items() if not result.modified}
            return replace(mine, results={**refused, **mine.results})

        return replace(self, regions=tuple(map(told, self.regions, other.regions)))

    def promising(self, budget: int, strict: bool) -> "Candidate":
        """The candidate whose programs say what its budget in bytes is, and whether they run no other calls."""
        return self.each(lambda region: replace(region, marks=replace(region.marks, budget=budget, strict=strict)))

    def holding_for(self, sizes: Mapping[str, int]) -> "Candidate":
        """The candidate whose one program promises its budget for these sizes and no larger ones."""
        marked = tuple(sizes.items())
        return self.each(lambda region: replace(region, marks=replace(region.marks, holds_for=marked)))

    def without_segments(self) -> "Candidate":
        """The same graphs as one program each."""
        return self.each(lambda region: replace(region, marks=NO_MARKS) if region.marks else region)

    def build(self) -> nn.Module:
        """The drop-in for the model."""
        return self.build_on(self.bench.model)

    def build_on(self, model: nn.Module) -> nn.Module:
        """The drop-in for another model with the same parts."""
        return assembled(model, self.written())

    def written(self) -> Written:
        """The programs that are the drop-in, to be simulated without making it."""
        return {region.region.path: region.program for region in self.regions}

    @property
    def programs(self) -> tuple[str, ...]:
        """The source of each region's program, which says all that a step of the candidate does."""
        return tuple(region.source for region in self.regions)

    def simulate(self, blocks: bool = True) -> Timeline:
        """The exact timeline of two steps.

        Plans are made and compared by what is asked for, ``blocks`` False: which block the allocator has for it depends
        on all that was there before, and is seen once a plan is chosen.
        """
        return self.bench.simulate(self.programs, self.written, blocks, self._noted)

    def peak(self, spare: int = 0) -> int:
        """The simulated peak in bytes, with ``spare`` more in forward and backward."""
        timeline = self.simulate(blocks=False)
        return max(timeline.peak_of_passes + spare, timeline.peak_of_optimizer)

    def rehearse(self, usual: Timeline, spare: int = 0) -> int:
        """``peak`` by one forward and backward pass, where that is as ``usual`` is in its second step and optimizer.

        In a third of the time, unless the model's second step differs from its first. ``usual`` is the timeline of any
        candidate of this bench.
        """
        if self.bench.one_pass_tells_nothing or self.bench.has_simulated(self.programs):
            return self.peak(spare)
        once = self.bench.one_pass(self.programs, self.written, usual, self._noted)
        return max(once + spare, usual.peak_of_optimizer)

    def is_clearly_above(self, size: int, usual: Timeline, spare: int = 0) -> bool:
        """Whether one pass tells that ``peak`` is above ``size`` bytes."""
        return self.rehearse(usual, spare) > _CLEAR * size

    @property
    def _noted(self) -> Noted | None:
        """What is known of its passes; None where some of what they do is in no program."""
        if [region.region.path for region in self.regions] != [""]:
            return None
        bare = self.each(
            lambda region: region if region.marks.bare else replace(region, marks=Marks(region.marks.nodes))
        )
        return self.bench.noted(bare.programs, self.room)

    def attributed(self, blocks: bool = True) -> Timeline:
        """What ``simulate`` gives, with the submodule that made each storage."""
        noted, written = self._noted, self.written()
        return self.bench.predict(self.bench.model, written=written, attribute=True, blocks=blocks, noted=noted)

    def peak_of(self, result: nn.Module, step: Step) -> int:
        """The predicted peak in bytes of the step in another loop, of what was made of it or of the model itself."""
        noted = None if result is self.bench.model else self._noted
        mine, other = self.bench.step.loop, step.loop
        if noted is not None and (mine.keeps_output, mine.scaler) != (other.keeps_output, other.scaler):
            noted = replace(noted, courses={})  # a pass holds something else
        return self.bench.predict(result, step, noted=noted).peak

    def reserved_under(self, cap: int) -> int:
        """What CUDA's allocator reserves in bytes if it is to be at most ``cap``; more than that where it cannot be.

        A process that may reserve no more runs out of memory then. ``cap`` where the step depends on values, and this
        is not known.
        """
        at_all = self.making_room(1)  # a byte: none is made, and where is seen
        return self.bench.reserved_under(at_all.programs, at_all.written, cap, self.room, at_all._noted)

    def costs(self, region: CandidateRegion) -> Costs:
        """What the nodes of a region's graph take."""
        return self.bench.costs(region.effects)

    def times(self) -> tuple[float, float] | None:
        """The predicted times of a step in ms, of the device and of the CPU that starts its work.

        None without a profile, where nodes are fused, and where parts are no graph.
        """
        if [region.region.path for region in self.regions] != [""]:
            return None
        (region,) = self.regions
        return self.bench.times(region.effects, region.region.captured.restored, region.marks)

    def abandoned(self) -> "Candidate":
        """Every rewrite dropped, because together they take more memory than the model as it is."""

        def dropped(region: CandidateRegion) -> CandidateRegion:
            results = {name: _refused(result) for name, result in region.results.items()}
            return replace(region, marks=NO_MARKS, results=results)

        return self.each(dropped)


def _refused(result: Result) -> Result:
    reason = "With all rewrites the peak would be above that of the model as it is."
    return Result((), (*result.refused, *_refusals(result.applied, reason)))


def _refusals(applied: Iterable[Applied], reason: str) -> Iterator[Refused]:
    return (Refused(each.where, reason) for each in applied)
