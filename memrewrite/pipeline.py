"""The middle of the line: a captured model is rewritten, planned under the budget and built, all on fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memrewrite import registry
from memrewrite.capture import Captured
from memrewrite.capture.normal import leaf_tensors
from memrewrite.checks import broken, health
from memrewrite.codegen import generate
from memrewrite.effects import GRANULE, Effects, observe
from memrewrite.errors import InternalError
from memrewrite.passes.checkpoint_segments import CheckpointSegments, clear
from memrewrite.passes.inplace_activation import InplaceActivation
from memrewrite.plan.facts import chain, compute_nodes
from memrewrite.plan.refine import Fitted, fit
from memrewrite.plan.segments import Plan
from memrewrite.rewrite import Pass, Result
from memrewrite.runtime.dropin import build, program_from
from memrewrite.simulate import Timeline, simulate
from memrewrite.step import Inputs, Step, device_type


@dataclass
class Line:
    """One model on its way through the passes: the captured graph and what each pass did to it."""

    model: nn.Module
    captured: Captured
    inputs: Inputs
    step: Step
    workspace: int
    results: dict[str, Result]
    arithmetic_changed: bool = False

    @property
    def example(self) -> list[Tensor]:
        """The tensors of the graph's placeholders, in order."""
        return leaf_tensors(self.model, self.inputs)

    def observe(self) -> Effects:
        """Fresh facts about the graph as it is now."""
        return observe(self.captured.graph_module, self.example, self.step.amp, grad=self.step.mode == "train")

    def apply(self, graph_pass: Pass, look: Callable[[], Effects] | None = None) -> Result:
        """Run one pass on what ``look`` sees (``observe`` by default) and hold it to what it says about itself."""
        look = look or self.observe
        before = self.captured.graph_module.code
        effects = look()
        healthy = health(effects)
        result = graph_pass(self.captured.graph_module, effects)
        self.captured.graph_module.graph.lint()
        self.captured.graph_module.recompile()
        changed = self.captured.graph_module.code != before
        if changed != result.modified and graph_pass.name != CheckpointSegments.name:
            raise InternalError(f"The pass {graph_pass.name} says modified={result.modified}; its code says {changed}.")
        if changed and (wrongs := broken(healthy, health(look()))):
            raise InternalError(f"The pass {graph_pass.name} broke the graph: {' '.join(wrongs)}")
        self.results[graph_pass.name] = result
        self.arithmetic_changed |= result.modified and not graph_pass.exact
        return result

    def build(self) -> nn.Module:
        """The drop-in module of the graph as it is now."""
        source, constants = generate(self.captured)
        return build(self.model, program_from(source), constants)

    def simulate(self) -> Timeline:
        """The exact timeline of two steps of the graph as it is now."""
        return simulate(self.build(), self.inputs, self.step, workspace_bytes=self.workspace)

    def segments(self, plan: Plan) -> None:
        """Turn a plan into segments."""
        self.apply(CheckpointSegments(plan))


def without_hooks(model: nn.Module) -> nn.Module:
    """The same model, sharing everything with ``model`` but the hooks registered on ``model`` itself."""
    kind = type(model)
    result = kind.__new__(kind)
    vars(result).update(vars(model))
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
    for graph_pass in registry.patterns(names, exact):
        line.apply(graph_pass)


def plan(line: Line, budget: int) -> Fitted:
    """Find segments so that the simulated peak is within ``budget`` bytes, and mark them.

    Marks the plan of the lowest peak when none fits.
    """
    clear(line.captured.graph_module)
    effects = line.observe()
    timeline = line.simulate()
    numbers = chain(effects, device_type(line.model, line.inputs), line.step.amp)
    fixed = timeline.floor - sum(_rounded(p) for p in line.model.parameters() if p.requires_grad)

    def simulated(candidate: Plan) -> int:
        line.segments(candidate)
        return line.simulate().peak

    fitted = fit(numbers, budget, timeline.peak, fixed, simulated)
    line.segments(fitted.plan)
    return fitted


def no_plan(line: Line, budget: int) -> Fitted:
    """What ``plan`` says when segments are not among the passes asked for."""
    peak = line.simulate().peak
    return Fitted(Plan(), peak, peak <= budget)


def mark_inplace(line: Line, names: tuple[str, ...] | None) -> None:
    """Mark activations in place, once and last, because legality depends on the segments.

    What autograd keeps depends on the call: it is observed as if everything required a gradient and without autocast,
    whose copies would be kept in place of what is marked, so that whoever calls the result may choose.
    """
    if InplaceActivation.name in line.results or (names is not None and InplaceActivation.name not in names):
        return
    with _all_trained(line.model):
        example = [t.detach().requires_grad_(_differentiable(t)) for t in line.example]
        graph_module, grad = line.captured.graph_module, line.step.mode == "train"
        line.apply(InplaceActivation(), lambda: observe(graph_module, example, grad=grad))


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    frozen = [p for p in model.parameters() if not p.requires_grad and _differentiable(p)]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _differentiable(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()


def without_segments(line: Line) -> Callable[[], None]:
    """Take the segments off the graph; calling the result puts them back (to compare the two programs bit for bit)."""
    keys = ("segment", "random", "run_once")
    nodes = compute_nodes(line.observe())
    kept = [{key: node.meta[key] for key in keys if key in node.meta} for node in nodes]
    clear(line.captured.graph_module)

    def restore() -> None:
        for node, marks in zip(nodes, kept, strict=True):
            node.meta.update(marks)

    return restore


def _rounded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // GRANULE) * GRANULE
