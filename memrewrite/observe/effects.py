"""What every node of a captured graph reads, writes, makes and has autograd save: observed, never looked up.

The graph runs node by node on fake tensors under a dispatch mode and ``saved_tensors_hooks``, so the level of the
graph (ATen overloads, torch functions, methods, higher-order ops) does not matter and no table of operators is kept.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from memrewrite.observe.carried import Carried, Run, Runs, forms_of
from memrewrite.observe.node_effects import NodeEffects
from memrewrite.observe.opaque_calls import is_opaque
from memrewrite.observe.recorder import Origin, Recorder, Storage
from memrewrite.records.errors import CaptureError
from memrewrite.simulate.fake.as_seen import on_fakes_or_seen
from memrewrite.simulate.fake.fakes import fake_twin, running_on_fakes
from memrewrite.simulate.fake.true_results import TrueResults
from memrewrite.simulate.memory.repeats import ambient, in_place_of_pieces
from memrewrite.targets.eager import EAGER, Target
from memrewrite.torch_internals.custom_functions import kept_as_attributes
from memrewrite.torch_internals.fake_tensors import as_parameter, fake_of, in_place_of_modes
from memrewrite.torch_internals.pytrees import tensors_in, tree_iter
from memrewrite.workload.step import autocast
from memrewrite.workload.surroundings import surroundings_put_back


@dataclass(frozen=True)
class Effects:
    """The facts of a whole graph; ``order`` is its nodes in execution order, ``of`` the facts of each.

    ``runs`` is how they ran, which tells a graph that is made of this one; None where it does not.
    """

    order: tuple[fx.Node, ...]
    of: dict[fx.Node, NodeEffects]
    storages: dict[int, Storage]
    runs: Runs | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def position(self) -> dict[fx.Node, int]:
        """The index of each node in ``order``."""
        return {node: i for i, node in enumerate(self.order)}

    @functools.cached_property
    def readers(self) -> dict[int, set[fx.Node]]:
        """The nodes that read each storage, but those that only give the graph what was there before."""
        found: dict[int, set[fx.Node]] = defaultdict(set)
        for node, facts in self.of.items():
            if node.op not in ("get_attr", "placeholder"):
                for key in facts.reads:
                    found[key].add(node)
        return found

    @functools.cached_property
    def counters(self) -> frozenset[fx.Node]:
        """The nodes that only update buffers that none but such nodes touch (``num_batches_tracked += 1``).

        One that draws is none: without it, what runs after it again would draw something else.
        """
        found = {node for node, facts in self.of.items() if facts.writes and not (node.users or facts.random)}
        for node, facts in self.of.items():
            if any(self.storages[key].origin != "buffer" for key in facts.writes | facts.outputs):
                found.discard(node)
        while others := {node for node in found if any(self.readers[key] - found for key in self.of[node].writes)}:
            found -= others
        return frozenset(found)

    @functools.cached_property
    def savers(self) -> dict[int, set[fx.Node]]:
        """The nodes because of which autograd keeps each storage."""
        found: dict[int, set[fx.Node]] = defaultdict(set)
        for node, facts in self.of.items():
            for key in facts.saved:
                found[key].add(node)
        return found

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Every storage that some node writes."""
        return frozenset(key for facts in self.of.values() for key in facts.writes)

    def of_copy(self, graph: fx.Graph) -> "Effects":
        """The same facts of a copy of the graph that has not been changed since."""
        copies = dict(zip(self.order, graph.nodes, strict=True))
        of = {copies[node]: facts for node, facts in self.of.items()}
        return Effects(tuple(copies.values()), of, self.storages, self.runs and self.runs.on(copies))

    @property
    def kept(self) -> int:
        """Bytes of what the nodes make that autograd keeps."""
        saved = {key for facts in self.of.values() for key in facts.saved}
        return sum(self.storages[key].bytes for key in saved if self.storages[key].origin == "node")


def observe(
    graph_module: fx.GraphModule,
    example: list[Any],
    amp: torch.dtype | None = None,
    grad: bool = True,
    target: Target = EAGER,
    before: Effects | None = None,
) -> Effects:
    """Run every node once on fake copies of ``example`` (a tensor or number per placeholder) and record what it does.

    ``grad`` False observes it under ``torch.no_grad``, where nothing is saved; what runs, and what it counts as, is up
    to ``target``. ``before`` are the effects that some of the nodes had in another graph, for the same target: those
    that are given the same need not run. Leaves each node's fake result in ``node.meta["val"]``. No real memory is
    touched.
    """
    asked = graph_module, example, amp, grad, target
    if before is not None and before.runs is not None:
        with suppress(Exception):  # an error is what it is without what was before
            return _observed(before.runs, *asked)
    return _observed(Runs(), *asked)


def _observed(
    before: Runs,
    graph_module: fx.GraphModule,
    example: list[Any],
    amp: torch.dtype | None,
    grad: bool,
    target: Target,
) -> Effects:
    device = next((t.device.type for t in (*graph_module.parameters(), *tensors_in(example))), "cpu")
    observer = _Observer(graph_module, target, device, before)
    inputs = [observer.given(value) if isinstance(value, Tensor) else value for value in example]
    with (
        surroundings_put_back((graph_module,)),  # what it calls is the user's code
        running_on_fakes(observer.fake, target),
        TrueResults(target),
        in_place_of_pieces(observer.recorder.once),
        observer.recorder,
        saved_tensors_hooks(observer.recorder.pack, _unpack),
        autocast(amp, device),
        torch.set_grad_enabled(grad),
    ):
        observer.run(*inputs)
    facts = {node: run.facts for node, run in observer.runs.of.items()}
    runs = observer.runs if observer.runs.tell_others() else None
    return Effects(tuple(graph_module.graph.nodes), facts, observer.recorder.storages, runs)


def computing(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of the nodes of a graph that run."""
    return [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]


def autocast_switch(node: fx.Node) -> int:
    """+1 where an autocast region opens, -1 where it closes (Dynamo's graphs spell them as calls)."""
    return {"_enter_autocast": 1, "_exit_autocast": -1}.get(getattr(node.target, "__name__", ""), 0)


class _Observer(fx.Interpreter):
    """Runs the graph on fake tensors; parameters are made fake as they are met."""

    def __init__(self, graph_module: fx.GraphModule, target: Target, device: str, before: Runs) -> None:
        super().__init__(graph_module)
        self.fake = before.mode
        self.recorder = Recorder(target, device)
        self.carried = Carried(before, self.recorder)
        self.runs = Runs(self.fake, storages=self.recorder.storages)
        self._submodules = {path: self._twin(path) for path in _submodules_called(graph_module.graph)}

    def _twin(self, path: str) -> nn.Module:
        """The fake twin of a submodule that stays a call; what is its own is there before the graph runs."""
        twin = fake_twin(self.module.get_submodule(path), self.fake)
        for parameter in twin.parameters():
            self.known(parameter, "parameter")
        for buffer in twin.buffers():
            self.known(buffer, "buffer")
        return twin

    def given(self, tensor: Tensor) -> Tensor:
        """A fake of an input.

        A model may write its inputs in place; PyTorch forbids that for leaves that require a gradient, hence the clone.
        Detached, because the conversion would also copy .grad and the history of a non-leaf.
        """
        fake = self.fake.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
        return self.known(fake.clone() if fake.requires_grad else fake, "input")

    def known(self, fake: Tensor, origin: Origin) -> Tensor:
        """Note a fake tensor that is there before the graph runs."""
        self.recorder.begin(-1)
        self.recorder.storage(fake, origin)
        return fake

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        attributes = self.runs.attributes
        if id(value) not in attributes:
            origin: Origin = "parameter" if isinstance(value, nn.Parameter) else "buffer"
            fake = self.carried.fake_of(value)
            attributes[id(value)] = value, self.known(self._fake(value) if fake is None else fake, origin)
        return attributes[id(value)][1]

    def _fake(self, value: Tensor) -> Tensor:
        if type(value) is not nn.Parameter or value.is_meta:
            return self.fake.from_tensor(value)
        with in_place_of_modes():
            plain = value.detach()
        return as_parameter(fake_of(plain, self.fake), value.requires_grad)

    def run_node(self, n: fx.Node) -> Any:
        recorder, made = self.recorder, self.runs.of
        recorder.begin(len(made))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = ambient(recorder.device_type), args, kwargs
        if (run := self.carried.again(n, given)) is None:
            first = len(recorder.storages)
            result, facts = self._run(n, len(made), args, kwargs)
            n.meta["val"] = result
            keys, forms = tuple(map(recorder.storage, tensors_in(result))), forms_of(result)
            result = self.carried.as_before(n, result, keys, forms)
            run = Run(n.target, given, result, keys, forms, facts, range(first, len(recorder.storages)))
        else:
            n.meta["val"] = run.result
        made[n] = run
        return run.result

    def _run(self, n: fx.Node, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, NodeEffects]:
        """What a node gives, and what it does."""
        recorder = self.recorder
        given: set[int] = set()
        if n.op not in ("placeholder", "get_attr"):
            given = {recorder.storage(t) for t in tensors_in((args, kwargs))}
        if n.op == "call_module":
            result = self._submodule(n, args, kwargs)
        else:
            result = getattr(self, n.op)(n.target, args, kwargs)
        if n.op in ("placeholder", "get_attr"):
            recorder.begin(index)
        recorder.saved |= {recorder.storage(tensor) for tensor in kept_as_attributes(result)}

        def before(keys: set[int]) -> frozenset[int]:
            return frozenset(key for key in keys if recorder.storages[key].producer < index)

        opaque = is_opaque(n)
        return result, NodeEffects(
            reads=before(recorder.reads) | given,
            writes=before(recorder.writes),
            outputs=frozenset(recorder.storage(t) for t in tensors_in(result)),
            saved=frozenset(recorder.saved),
            saves_output=before(recorder.saved) != recorder.saved or bool(recorder.saved & recorder.writes),
            random=recorder.random or n.meta.get(_DRAWS, False),
            flops=recorder.flops,
            moved=recorder.moved,
            rerun=recorder.rerun,
            statistics=before(recorder.statistics),
            stale_save=recorder.stale_save,
            opaque=opaque,
            repeats=n.meta.get(_REPEATS, not opaque),
        )

    def _submodule(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        twin = self._submodules[str(node.target)]
        return on_fakes_or_seen(node, lambda: twin(*args, **kwargs), [*tree_iter((args, kwargs)), *twin.parameters()])


_REPEATS, _DRAWS = "memrewrite_repeats", "memrewrite_draws"  # in a node's meta, which graphs copy with the node


def note_runs(node: fx.Node, repeats: bool, draws: bool) -> None:
    """Say of a call whether it gives the same whenever it runs, and whether it may draw from PyTorch's generators."""
    node.meta[_REPEATS], node.meta[_DRAWS] = repeats, draws


def _submodules_called(graph: fx.Graph) -> list[str]:
    return list(dict.fromkeys(str(node.target) for node in graph.find_nodes(op="call_module")))


def _unpack(token: object) -> Tensor:
    raise CaptureError("A part that stays a call takes gradients in forward, where what it keeps is not there to see.")
