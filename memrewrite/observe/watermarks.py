"""What a step needs at each node of a graph besides what autograd keeps: observed in one forward and backward pass.

Autograd numbers what it is to run backward in the order of the forward pass, so every operator of the backward pass can
be laid at the door of a node. Nothing is looked up: temporaries of backward formulas, gradients that wait to be added
and operators' own workspaces show as they are.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from memrewrite.observe.effects import computing
from memrewrite.simulate.fake.as_seen import on_fakes_or_seen
from memrewrite.simulate.fake.fakes import on_fakes, put_back
from memrewrite.simulate.fake.true_results import TrueResults
from memrewrite.simulate.memory.repeats import repeated
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.state.random_state import preserved_rng
from memrewrite.targets.eager import Target
from memrewrite.targets.transients import Transients
from memrewrite.torch_internals.autograd_nodes import backward_number, next_backward_number
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS
from memrewrite.torch_internals.pytrees import tensors_in, tree_leaves
from memrewrite.workload.step import Inputs, Step, autocast

LossOf = Callable[[Any], Tensor]


@dataclass
class Watermarks:
    """Bytes in use at one node beyond those from before the graph ran, 0 where there was nothing to run.

    ``forward`` and ``backward`` are the most while the node and its backward ran, ``pending`` what was in use as
    backward came to it.
    """

    forward: int = 0
    backward: int = 0
    pending: int = 0


def watermarks(
    graph_module: fx.GraphModule,
    example: list[Any],
    step: Step,
    loss_of: LossOf | None = None,
) -> dict[fx.Node, Watermarks]:
    """Run the graph forward and backward once on fake copies of ``example``; the levels of every node.

    ``loss_of`` makes a loss of what the graph returns; without it every output has a gradient
    of its own. Autocast keeps no casts of weights, as in segments. No real memory is touched.
    """
    held = step.targets(graph_module, Inputs(tuple(example), {})).buffers
    with preserved_rng([*graph_module.parameters(), *tensors_in(example)]), put_back(held):
        try:
            return _watermarks(graph_module, example, step, loss_of)
        except FAKE_TENSOR_ERRORS:
            if loss_of is None:
                raise
            return _watermarks(graph_module, example, step, None)  # the loss depends on values


def _watermarks(
    graph_module: fx.GraphModule, example: list[Any], step: Step, loss_of: LossOf | None
) -> dict[fx.Node, Watermarks]:
    device = next((t.device for t in (*graph_module.parameters(), *tensors_in(example))), torch.device("cpu"))
    transients = step.target.transients(device)
    given = Inputs(tuple(example), {})
    with on_fakes(graph_module, given, step.target) as (twin, fakes), TrueResults(step.target):
        # A model may write its inputs in place; PyTorch forbids that for leaves that require a gradient.
        inputs = [fake.clone() if isinstance(fake, Tensor) and fake.requires_grad else fake for fake in fakes.args]
        before = [*twin.parameters(), *twin.buffers(), *tensors_in(inputs), *_waiting(twin, step)]
        watch = _Watch(device.type, transients, before, step.target)
        runner = _Runner(twin, graph_module.graph, watch)
        plain = step.mesh is None and not step.target.fuses
        with repeated([watch]) if plain else nullcontext(), _spent(twin, step), watch:
            with autocast(step.amp, device.type, cached=False):
                outputs = runner.run(*inputs)
                runner.env.clear()  # where what it returned is, too
                kept = outputs if loss_of is not None and step.loop.keeps_output else None
                outputs = [outputs if loss_of is None else loss_of(outputs)]
            trained = [leaf for leaf in tensors_in(outputs) if leaf.requires_grad]
            del outputs
            watch.starts, watch.end = runner.starts, next_backward_number()
            # Without the model's own loss the outputs of a region may have gradients that the model never asks for,
            # and which PyTorch refuses where it wrote what they need; the nodes backward did not come to stay at 0.
            with nullcontext() if loss_of else suppress(RuntimeError):
                torch.autograd.backward(trained, [torch.ones_like(output) for output in trained])
        watch.turn(None)
        del kept
    found = dict(zip(graph_module.graph.nodes, watch.found, strict=True))
    return found if loss_of is None else _with_loss(found)


def _with_loss(found: dict[fx.Node, Watermarks]) -> dict[fx.Node, Watermarks]:
    """The levels, where those of the loss, which are the output's, are for the last node that computes."""
    loss = found[next(reversed(found))]
    for last in computing(found)[-1:]:
        found[last].forward = max(found[last].forward, loss.forward, loss.backward)
    return found


def _waiting(twin: nn.Module, step: Step) -> list[Tensor]:
    """The gradients of earlier passes, to which backward adds."""
    trained = [p for p in twin.parameters() if p.requires_grad] if step.gradients_wait else step.left_in(twin)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    return [cast(Tensor, parameter.grad) for parameter in trained]


@contextmanager
def _spent(twin: nn.Module, step: Step) -> Iterator[None]:
    """Meanwhile gradients end as they come, if the optimizer uses them then."""

    def end(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [p for p in twin.parameters() if p.requires_grad and step.in_backward]
    handles = [parameter.register_post_accumulate_grad_hook(end) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(Tracker):
    """Notes the levels of the node whose operators run, which in the backward pass it finds out itself."""

    promises = False

    def __init__(self, device_type: str, transients: Transients | None, before: list[Tensor], target: Target) -> None:
        super().__init__(device_type, transients, target=target)
        self.register(before, "before")
        self.base = self.current
        self.found: list[Watermarks] = []
        self.starts: list[int] = []  # by node, the number of what it was the first to leave for backward
        self.end = 0  # the number of what backward leaves for a backward inside of it, of the node whose turn it is
        self._turn: int | None = None

    def forward(self) -> None:
        """A node of the forward pass has run; its levels follow those of the nodes before it."""
        self.found.append(Watermarks(self.peak - self.base))
        self.reset_peak()

    def turn(self, index: int | None) -> None:
        """Backward comes from one node to that of ``index``; what was before that is of the loss, and of the output."""
        levels, level = self.found[-1 if self._turn is None else self._turn], self.peak - self.base
        if self._turn is None:
            levels.forward = max(levels.forward, level)
        else:
            levels.backward = max(levels.backward, level)
        self.reset_peak()
        self._turn = index
        if index is not None and not self.found[index].backward:
            self.found[index].pending = self.current - self.base

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = backward_number() if self.starts else None
        if number is not None and number < self.end and (index := bisect_right(self.starts, number) - 1) != self._turn:
            self.turn(index)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Runner(fx.Interpreter):
    """Runs a graph on the attributes of the fake twin of its module."""

    def __init__(self, twin: nn.Module, graph: fx.Graph, watch: _Watch) -> None:
        super().__init__(twin, graph=graph)
        self.watch = watch
        self.starts: list[int] = []

    def run_node(self, n: fx.Node) -> Any:
        self.starts.append(next_backward_number())
        result = self._submodule(n) if n.op == "call_module" else super().run_node(n)
        self.watch.forward()
        return result

    def _submodule(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        module = self.module.get_submodule(str(node.target))
        given = [*tree_leaves((args, kwargs)), *module.parameters()]
        self.watch.promises = True  # backward of what holds a sparse tensor inside has no sizes either
        try:
            return on_fakes_or_seen(node, lambda: module(*args, **kwargs), given)
        finally:
            self.watch.promises = False
