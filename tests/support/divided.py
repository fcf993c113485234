"""Joint graphs divided by the back end's partitioner and run node by node, with every storage counted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from memrewrite.backends.asked import Asked
from memrewrite.backends.partition import Partition
from memrewrite.backends.resident import Resident
from memrewrite.records.options import Budget
from memrewrite.simulate.memory.tracker import Tracker

NOTHING = Resident(0, 0, 0, 0, 0, 0, 0, 0, 0)


class Divided:
    """A model whose joint graphs are divided within ``budget`` for what they make themselves; None: as PyTorch does.

    What the graphs make is counted as it lives and dies.
    """

    def __init__(self, model: nn.Module, budget: str | int | None, fused: bool = False, **options: Any) -> None:
        self.graphs: list[tuple[fx.GraphModule, fx.GraphModule]] = []
        asked = Asked(None if budget is None else Budget.parse(budget))
        self.partition = Partition(asked, NOTHING, fused)
        self.tracker = Tracker("cpu")
        torch._dynamo.reset()
        run = self._running
        backend = aot_autograd(
            fw_compiler=run, bw_compiler=run, partition_fn=self._divide, decompositions=select_decomp_table()
        )
        self.compiled = torch.compile(model, backend=backend, **options)
        self.model = model

    def _divide(self, *args: Any, **kwargs: Any) -> Any:
        pair = self.partition(*args, **kwargs)
        self.graphs.append(pair)
        return pair

    def _running(self, graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        def run(args: list[Any]) -> Any:  # lets go of what it is given, and of what it makes, after the last use
            with self.tracker:
                return torch.fx.Interpreter(graph).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def step(self, *inputs: Tensor) -> Tensor:
        """The loss, after backward; the same random numbers each time."""
        self.tracker.register([*inputs, *self.model.parameters(), *self.model.buffers()], "model")
        self.there = self.tracker.current
        torch.manual_seed(1)
        loss: Tensor = self.compiled(*inputs)
        loss.backward()
        return loss.detach()

    @property
    def peak(self) -> int:
        """The most bytes that the graphs of the step had made, and not let go of."""
        return self.tracker.peak - self.there

    @property
    def kept(self) -> int:
        """Bytes handed from forward to backward in all graphs, inputs of the graphs aside."""
        return sum(kept_bytes(backward) for _, backward in self.graphs)

    @property
    def nodes(self) -> list[str]:
        """The operators of all backward graphs, in order."""
        return [str(n.target) for _, backward in self.graphs for n in backward.graph.nodes if n.op == "call_function"]


def kept_bytes(backward: fx.GraphModule) -> int:
    """The bytes that a backward graph is handed, but for inputs of forward and gradients."""
    found = {}
    for node in backward.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor) and not node.name.startswith(("primals", "tangents")):
            found[value.untyped_storage()] = int(value.untyped_storage().nbytes())
    return sum(found.values())


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of all parameters, taken off."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return found
