"""Which calls that nobody looks into give the same twice: tried on real tensors, as only those may run again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from memrewrite.costs.calls import Call, call_of
from memrewrite.observe.effects import observe
from memrewrite.records.function_call import FunctionCall
from memrewrite.state.bits import same_bits
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.step import Step, autocast


def note_what_repeats(graph_module: fx.GraphModule, example: list[Tensor], step: Step) -> None:
    """Say of each custom Function in a graph, given one tensor per placeholder, whether it may be applied again."""
    calls = [node for node in graph_module.graph.nodes if isinstance(node.target, FunctionCall)]
    if not calls:
        return
    effects = observe(graph_module, example, step.amp, target=step.target)
    known: dict[str, bool] = {}
    for node in calls:
        call = call_of(node, effects.of[node], step.amp)
        text = "" if call is None else call.text
        if text not in known:
            known[text] = call is not None and _repeats(call)
        node.target = replace(node.target, repeats=known[text])


def _repeats(call: Call) -> bool:
    """Whether two runs on the same, with the same random state, give the same bits; False for one that fails."""
    try:
        run, given = call.prepared()
        before = [tensor.detach().clone() for tensor in given]
        first = _results(run, given, call)
        with torch.no_grad():
            for tensor, value in zip(given, before, strict=True):
                tensor.copy_(value)
        second = _results(run, given, call)
    except Exception:  # whatever the user's code says of numbers that are not its own
        return False
    return len(first) == len(second) and all(map(_same, first, second))


def _results(run: Callable[[], Any], given: list[Tensor], call: Call) -> list[Any]:
    with preserved_rng(given), torch.set_grad_enabled(call.grad), autocast(call.amp, given[0].device.type):
        return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(run())]


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return same_bits(a, b)
