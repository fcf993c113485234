"""The middle of the line: a captured model is rewritten, planned under the budget and built, all on fake tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from memrewrite.codegen.writer import generate
from memrewrite.costs import Costs, normalizations, roofline_costs
from memrewrite.costs.compiled import when_compiled
from memrewrite.costs.profile import Profile
from memrewrite.costs.steptime import step_times
from memrewrite.costs.work import of_loss, of_optimizer
from memrewrite.measurement.measuring import predict
from memrewrite.observe.effects import Effects, observe
from memrewrite.observe.watermarks import Levels, levels
from memrewrite.passes import early_casts
from memrewrite.passes.checkpoint_segments import MARKS, CheckpointSegments, clear
from memrewrite.plan.refine import Fitted, Search
from memrewrite.plan.segments import Chain, Plan
from memrewrite.plan_facts.chain import chain, compute_nodes_of, join
from memrewrite.records.errors import DataDependentError, InternalError
from memrewrite.rewriting.contract import Pass, Refused, Result
from memrewrite.rewriting.invariants import broken, health
from memrewrite.runtime.batch_norm import kernel_runs_on
from memrewrite.runtime.dropin import build, graft, program_from
from memrewrite.search import registry
from memrewrite.search.regions import Region
from memrewrite.simulate import Timeline, preserved_rng, simulate
from memrewrite.simulate.memory.allocator import rounded
from memrewrite.torch_internals.private import tree_unflatten
from memrewrite.workload.step import Inputs, Step, default_loss, device_of


@dataclass
class Part:
    """One region on its way through the passes: its graph and what each pass did to it."""

    region: Region
    step: Step
    results: dict[str, Result] = field(default_factory=dict)
    arithmetic_changed: bool = False
    _observed: tuple[list[fx.Node], str, Effects] | None = None  # the graph they are of, and the facts
    _levels: tuple[list[fx.Node], str, dict[fx.Node, Levels]] | None = None  # likewise

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph as it is now."""
        return self.region.captured.graph_module

    def observe(self) -> Effects:
        """Facts about the graph as it is now; marks for segments do not change them."""
        nodes, code = list(self.graph_module.graph.nodes), self.graph_module.code
        if self._observed is None or self._observed[:2] != (nodes, code):
            step, grad = self.step, self.step.mode == "train"
            effects = observe(self.graph_module, self.region.example, step.amp, grad, step.as_cuda, step.compiled)
            self._observed = nodes, code, effects
        return self._observed[2]

    def forget(self) -> None:
        """Observe again next time: another way to look has left other values in the nodes."""
        self._observed = None

    def chain(self, costs: Costs) -> Chain:
        """The graph as it is now, as numbers for the planner."""
        nodes, code = list(self.graph_module.graph.nodes), self.graph_module.code
        if self._levels is None or self._levels[:2] != (nodes, code):
            loss_of = self._loss_of if not self.region.path else None
            self._levels = nodes, code, levels(self.graph_module, self.region.example, self.step, loss_of)
        found = chain(self.observe(), self._levels[2], costs, self.step.compiled)
        return replace(found, gradients=0) if self.step.gradients_wait else found  # which are there already

    def _loss_of(self, leaves: Any) -> Tensor:
        """The loss of what the graph returns, if that is all the model returns."""
        output = tree_unflatten(list(leaves), self.region.captured.output_tree)
        return (self.step.loss_fn or default_loss)(output)

    def apply(self, graph_pass: Pass, look: Callable[[], Effects] | None = None) -> Result:
        """Run one pass on what ``look`` sees (``observe`` by default) and hold it to what it says about itself."""
        if look is None:
            look = self.observe
        else:
            self.forget()
        before = self.graph_module.code
        effects = look()
        healthy = health(effects)
        result = graph_pass(self.graph_module, effects)
        self.graph_module.graph.lint()
        self.graph_module.recompile()
        changed = self.graph_module.code != before
        if changed != result.modified and graph_pass.name != CheckpointSegments.name:
            raise InternalError(f"The pass {graph_pass.name} says modified={result.modified}; its code says {changed}.")
        if changed and (wrongs := broken(healthy, health(after := look()))):
            raise InternalError(f"The pass {graph_pass.name} broke the graph: {' '.join(wrongs)}")
        if changed:
            result = replace(result, freed=effects.kept - after.kept)
        self.results[graph_pass.name] = result
        self.arithmetic_changed |= result.modified and not graph_pass.exact
        return result

    @property
    def source(self) -> str:
        """The program that the graph is now."""
        return generate(self.region.captured, self.region.prefix)[0]

    def build(self) -> nn.Module:
        """The drop-in for the region's module, of the graph as it is now."""
        source, constants = generate(self.region.captured, self.region.prefix)
        return build(self.region.module, program_from(source), constants)


@dataclass
class Line:
    """A model on its way: its regions in the order they run (one, the whole model, wherever that can be captured).

    ``left`` says of parts outside, by path, why they stay as they are; ``profile`` times nodes on their device,
    ``original`` are the predicted ``times`` of a step of the model as it is. Of a step that is ``compiled``, plans are
    for what ``torch.compile`` runs again, and how (see ``plan.demand``); ``in_turn`` says that it has to hold fewer
    tensors there and fuse less.
    """

    model: nn.Module
    inputs: Inputs
    step: Step
    workspace: int
    parts: list[Part]
    notes: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    profile: Profile | None = None
    original: tuple[float, float] | None = None
    in_turn: bool = False
    _searches: dict[bool, tuple[tuple[int, tuple[str, ...]], Search]] = field(
        default_factory=dict
    )  # with the bytes to spare and the programs they are for
    _simulated: dict[tuple[bool, tuple[str, ...]], Timeline] = field(default_factory=dict)  # by what was simulated

    @property
    def compiled(self) -> bool:
        """Whether the plans are for ``torch.compile``."""
        return self.step.compiled

    @property
    def results(self) -> dict[str, Result]:
        """What each pass did, over all regions."""
        merged: dict[str, Result] = {}
        for part in self.parts:
            for name, result in part.results.items():
                before = merged.get(name, Result())
                applied, refused = before.applied + result.applied, before.refused + result.refused
                merged[name] = Result(applied, refused, before.freed + result.freed)
        return merged

    @property
    def arithmetic_changed(self) -> bool:
        """Whether any rewrite computes other bits than the original."""
        return any(part.arithmetic_changed for part in self.parts)

    @property
    def captured_exactly(self) -> bool:
        """Whether every graph, before any rewrite, computes the bits of the original."""
        return all(part.region.captured.exact for part in self.parts)

    def build(self) -> nn.Module:
        """The drop-in for the model, of the graphs as they are now."""
        return graft(self.model, {part.region.path: part.build() for part in self.parts})

    def simulate(self, blocks: bool = True) -> Timeline:
        """The exact timeline of two steps of the graphs as they are now.

        Plans are made and compared by what is asked for, ``blocks`` False: which block the allocator has for it depends
        on all that was there before, and is seen once a plan is chosen.
        """
        blocks = blocks and self.step.device_type(self.model, self.inputs) == "cuda"
        key = (blocks, self._programs)
        if key not in self._simulated:
            workspace = self.workspace
            built = self.build()
            self._simulated[key] = predict(built, self.inputs, self.step, workspace_bytes=workspace, blocks=blocks)
        return self._simulated[key]

    def reserved_under(self, cap: int) -> int:
        """What the allocator of CUDA reserves for the graphs as they are now, in bytes, if it is to be at most ``cap``.

        More than that where it cannot be: a process that may reserve no more runs out of memory. ``cap`` where the step
        depends on values, and this is not known.
        """
        try:
            return simulate(self.build(), self.inputs, self.step, workspace_bytes=self.workspace, cap=cap).reserved
        except DataDependentError:
            return cap

    def attributed(self) -> Timeline:
        """What ``simulate`` gives, with the submodule that made each storage."""
        return predict(self.build(), self.inputs, self.step, workspace_bytes=self.workspace, attribute=True)

    def peak_of(self, module: nn.Module, step: Step) -> int:
        """The predicted peak in bytes of another step of a module, on the same inputs."""
        return predict(module, self.inputs, step, workspace_bytes=self.workspace).peak

    def peak(self, spare: int = 0) -> int:
        """The simulated peak in bytes of the graphs as they are now, with ``spare`` more in forward and backward."""
        timeline = self.simulate(blocks=False)
        return max(timeline.peak_of_passes + spare, timeline.peak_of_optimizer)

    def rehearse(self, usual: Timeline, spare: int = 0) -> int:
        """``peak`` by one forward and backward pass, where that is as ``usual`` is in its second step and optimizer.

        In a third of the time, unless the model's second step differs from its first. ``usual`` is the timeline of any
        program of this line.
        """
        if (False, self._programs) in self._simulated or self.step.loop.zero_grad == "in place":
            return self.peak(spare)  # in place, the first step has no gradients to add to
        step = replace(self.step, optimizer=None)
        once = predict(self.build(), self.inputs, step, workspace_bytes=self.workspace, steps=1, blocks=False)
        passes = once.repeated(usual, self.step.mode)
        return max(passes + spare, usual.peak_of_optimizer)

    @property
    def statistics(self) -> bool:
        """Whether batch normalizations in segments keep their statistics and apply them again, by a kernel for CUDA.

        That saves the device time and costs the CPU some: where a step takes the CPU longer, they run again as a whole.
        """
        if self.original is not None and self.original[0] < self.original[1]:
            return False
        return self.step.as_cuda or kernel_runs_on(device_of(self.model, self.inputs))

    def costs(self, part: Part) -> Costs:
        """What the nodes of a region's graph, as it is now, take: measured where there is a profile."""
        effects = part.observe()
        if self.profile is None:
            costs = roofline_costs(self.step.device_type(self.model, self.inputs), self.step.amp)
        else:
            costs = self.profile.costs(effects, self.step.amp)
        if self.compiled:
            return when_compiled(costs, effects)
        if not self.statistics:
            return costs
        found = normalizations.found(effects)
        again = self.profile.again(found) if self.profile else normalizations.again_ms(found, costs.roofline)
        return replace(costs, again=again)

    def times(self) -> tuple[float, float] | None:
        """The predicted times of a step in ms, of the device and of the CPU that starts its work.

        None without a profile, when compiled, and where parts are no graph.
        """
        if self.profile is None or self.compiled or [part.region.path for part in self.parts] != [""]:
            return None
        (part,) = self.parts
        tree = part.region.captured.output_tree
        device = self.step.device_type(self.model, self.inputs)
        with preserved_rng(self.inputs.tensors()):  # a loss of the user's may draw
            loss = of_loss(part.observe(), lambda flat: tree_unflatten(flat, tree), self.step, device)
            optimizer = of_optimizer(self.model, self.inputs, self.step)
        passes = self.step.micro_batches
        return step_times(part.observe(), self.costs(part), [*[loss] * passes, optimizer], passes)

    def searches(self, exact: bool, spare: int = 0) -> Search:
        """The search for plans of the graphs as they are now, whose segments are cleared.

        It simulates both steps and the optimizer (``exact``), or only ``rehearse``, with ``spare`` bytes more.
        """
        for part in self.parts:
            clear(part.graph_module)
        asked = spare, self._programs
        found = self._searches.get(exact)
        if found is None or found[0] != asked:
            self._searches[exact] = found = asked, self._search(exact, spare)
        return found[1]

    @property
    def _programs(self) -> tuple[str, ...]:
        return tuple(part.source for part in self.parts)

    def _search(self, exact: bool, spare: int) -> Search:
        seen = (timeline for (blocks, _), timeline in self._simulated.items() if not blocks)
        usual = next(seen, None) or self.simulate(blocks=False)

        def now() -> int:
            return self.peak(spare) if exact else self.rehearse(usual, spare)

        chains = join([part.chain(self.costs(part)) for part in self.parts])
        gradients = sum(rounded(p.nbytes) for p in self.model.parameters() if p.requires_grad)
        fixed = usual.floor - (0 if self.step.gradients_wait else gradients)  # which come as backward goes
        kept = gradients if self.step.loop.zero_grad == "before backward" and not self.step.gradients_wait else 0
        chains = replace(chains, left=usual.held + kept)
        if len(self.parts) > 1 or self.parts[0].region.path:  # whose levels do not show the model's output
            chains = replace(chains, work=chains.work + usual.held, pending=chains.pending + usual.held)

        def peak(candidate: Plan) -> int:
            self.segments(candidate)
            return now()

        return Search(chains, now(), fixed, peak, usual.peak_of_optimizer)

    def segments(self, plan: Plan) -> None:
        """Turn a plan over the regions' joined chains into segments."""
        start = 0
        for part in self.parts:
            end = start + len(compute_nodes_of(part.graph_module))
            part.apply(CheckpointSegments(plan.part(start, end), self.statistics, self.compiled, self.in_turn))
            start = end + 1  # the boundary that `join` puts between regions


def without_hooks(model: nn.Module) -> nn.Module:
    """The same model, sharing everything with ``model`` but the hooks registered on ``model`` itself."""
    kind = type(model)
    result: nn.Module = object.__new__(kind)  # past a __new__ of the class's own, which may call __init__
    vars(result).update({k: v for k, v in vars(model).items() if k != "_compiled_call_impl"})  # that one calls model
    vars(result).update({name: type(hooks)() for name, hooks in _call_hooks(model).items()})
    return result


def with_hooks_of(model: nn.Module, result: nn.Module) -> None:
    """Share the hooks registered on ``model`` itself with ``result``; their handles remove them from both."""
    vars(result).update(_call_hooks(model))


def _call_hooks(model: nn.Module) -> dict[str, dict[int, Any]]:
    """The dictionaries that calls of the model look into, not those of state dictionaries."""
    return {k: v for k, v in vars(model).items() if k.startswith(("_forward_", "_backward_")) and isinstance(v, dict)}


def rewrite(line: Line, names: tuple[str, ...] | None, exact: bool) -> None:
    """Functionalise and apply the pattern rewrites asked for (all when ``names`` is None)."""
    for part in line.parts:
        for graph_pass in registry.patterns(names, exact):
            part.apply(graph_pass)


def rewrite_slower(line: Line, names: tuple[str, ...] | None) -> None:
    """Apply the rewrites that cost time, for a peak that is above the budget without them."""
    for part in line.parts:
        for graph_pass in registry.slower(names):
            part.apply(graph_pass)


def plan(line: Line, budget: int, spare: int = 0) -> Fitted:
    """Find segments so that the simulated peak is within ``budget`` bytes, and mark them.

    One plan over all regions in the order they run. Marks the plan of the lowest peak when none fits. ``spare`` bytes
    are left for what forward and backward take besides; the peak in the result is with them.
    """
    if line.step.amp is not None and line.peak(spare) > budget:
        for part in line.parts:
            early_casts.insert(part.graph_module, part.observe())
    fitted = line.searches(exact=False, spare=spare).fit(budget)
    line.segments(fitted.plan)
    if line.peak(spare) != fitted.peak:
        fitted = line.searches(exact=True, spare=spare).fit(budget)
        line.segments(fitted.plan)
    if line.compiled and not (fitted.fits or line.in_turn):
        line.in_turn = True
        line.segments(fitted.plan)
    return fitted


def drop_needless_casts(line: Line) -> None:
    """Take away what ``plan`` spelled out and no segment begins with, unless the peak is lower with it."""
    peak = line.simulate(blocks=False).peak
    restored = [early_casts.drop_needless(part.graph_module) for part in line.parts]
    if line.simulate(blocks=False).peak > peak:
        for restore in restored:
            restore()


def cast_inputs(line: Line) -> Callable[[], None] | None:
    """Cast inputs before the segments that cast them; calling the result takes that back. None where none does."""
    found = [early_casts.insert_for_inputs(part.graph_module, part.observe()) for part in line.parts]

    def restore() -> None:
        for part, casts in zip(line.parts, found, strict=True):
            early_casts.take_away(part.graph_module, casts)

    return restore if any(found) else None


def no_plan(line: Line, budget: int) -> Fitted:
    """What ``plan`` says when segments are not among the passes asked for."""
    peak = line.simulate(blocks=False).peak
    return Fitted(Plan(), peak, peak <= budget)


def abandon(line: Line) -> None:
    """Drop every rewrite, because together they take more memory than the model as it is."""
    for part in line.parts:
        clear(part.graph_module)
        for name, result in part.results.items():
            dropped = (
                Refused(a.where, "With all rewrites the peak would be above that of the model as it is.")
                for a in result.applied
            )
            part.results[name] = Result((), (*result.refused, *dropped))


def without_segments(line: Line) -> Callable[[], None]:
    """Take the segments off the graphs; calling the result puts them back (to compare the programs bit for bit)."""
    nodes = [node for part in line.parts for node in compute_nodes_of(part.graph_module)]
    kept = [{key: node.meta[key] for key in MARKS if key in node.meta} for node in nodes]
    for part in line.parts:
        clear(part.graph_module)

    def restore() -> None:
        for node, marks in zip(nodes, kept, strict=True):
            node.meta.update(marks)

    return restore
