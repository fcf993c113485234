"""A graph as some passes have left it, with what is observed of it. It is never changed: passes get a copy."""

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from memrewrite.codegen.writer import generate
from memrewrite.observe.effects import Effects, computing, observe
from memrewrite.observe.watermarks import Watermarks, watermarks
from memrewrite.plan.marks import Marks
from memrewrite.rewriting.invariants import Health, health
from memrewrite.search.regions import Region
from memrewrite.torch_internals.tracing import module_of
from memrewrite.workload.step import Step, default_loss
from memrewrite.workload.surroundings import surroundings_put_back


@dataclass(frozen=True, eq=False)
class ObservedGraph:
    """The graph of a region, captured or rewritten, in the step that is planned for.

    ``before`` is what its nodes did in the graph that it was made of.
    """

    region: Region
    step: Step
    graph_module: fx.GraphModule
    before: Effects | None = None
    _copies: list[tuple[fx.GraphModule, Effects]] = field(default_factory=list, init=False)  # that are as it is
    _written: dict[Marks, tuple[str, dict[str, Tensor]]] = field(default_factory=dict, init=False)

    def is_as(self, graph: fx.Graph) -> bool:
        """Whether a graph that was a copy of it still is: told node by node, in a tenth of the time that code takes."""
        mine = self.graph_module.graph.nodes
        now = dict(zip(mine, graph.nodes, strict=False))
        return len(mine) == len(graph.nodes) and all(
            (node.op, node.name, node.target) == (copied.op, copied.name, copied.target)
            and fx.map_arg((node.args, node.kwargs), now.__getitem__) == (copied.args, copied.kwargs)
            for node, copied in now.items()
        )

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The nodes that run, in order."""
        return computing(self.graph_module.graph.nodes)

    @cached_property
    def effects(self) -> Effects:
        """What each node does."""
        step, grad = self.step, self.step.mode == "train"
        return observe(self.graph_module, self.region.example, step.amp, grad, step.target, self.before)

    @cached_property
    def watermarks(self) -> dict[fx.Node, Watermarks]:
        """What is in use as each node runs forward and backward."""
        loss_of = self._loss_of if not self.region.path else None
        with surroundings_put_back((), self.step.loss_fn):
            return watermarks(self.graph_module, self.region.example, self.step, loss_of)

    def written(self, marks: Marks) -> tuple[str, dict[str, Tensor]]:
        """The program that it is with these marks, as source, and the tensors it holds."""
        if marks not in self._written:
            captured = replace(self.region.captured, graph_module=self.graph_module)
            self._written[marks] = generate(captured, self.region.prefix, marks)
        return self._written[marks]

    def copied(self) -> tuple[fx.GraphModule, Effects]:
        """The graph once more, which may be changed, and its effects."""
        if self._copies:
            return self._copies.pop()
        effects = self.effects  # observed before, as values are copied with their nodes
        graph = copy.deepcopy(self.graph_module.graph)
        copied = module_of(self.graph_module, graph, type(self.graph_module).__name__)
        return copied, effects.of_copy(graph)

    def left_alone(self, graph_module: fx.GraphModule, effects: Effects) -> None:
        """Take back a copy that nobody has changed: it is the next one."""
        self._copies.append((graph_module, effects))

    @cached_property
    def health(self) -> Health:
        """How its values look, and what is wrong with it."""
        return health(self.effects)

    def _loss_of(self, leaves: Any) -> Tensor:
        """The loss of what the graph returns, if that is all the model returns."""
        return (self.step.loss_fn or default_loss)(self.region.captured.restored(leaves))
