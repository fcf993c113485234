"""Which calls that nobody looks into give the same twice: tried on real tensors, as only those may run again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from memrewrite.costs.calls import Call, call_of
from memrewrite.observe.effects import note_that_it_repeats, observe
from memrewrite.records.function_call import FunctionCall
from memrewrite.runtime.guards import HOOKS
from memrewrite.simulate.fake.as_seen import note_kept
from memrewrite.state.attributes import Attributes
from memrewrite.state.bits import same_bits
from memrewrite.state.random_state import draws, preserved_rng
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.step import Step, autocast


def note_what_repeats(graph_module: fx.GraphModule, example: list[Tensor], step: Step) -> None:
    """Say of each call that nobody looks into, given one tensor per placeholder, whether it may run again."""
    functions = [node for node in graph_module.graph.nodes if isinstance(node.target, FunctionCall)]
    submodules = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    if not functions and not submodules:
        return
    effects = observe(graph_module, example, step.amp, target=step.target)
    known: dict[str, bool] = {}
    for node in functions:
        call = call_of(node, effects.of[node], step.amp)
        text = "" if call is None else call.text
        if text not in known:
            known[text] = call is not None and _repeats(call)
        node.target = replace(node.target, repeats=known[text])
    for node in submodules:
        module = graph_module.get_submodule(str(node.target))
        submodule = call_of(node, effects.of[node], step.amp, module)
        if submodule is not None and _leaves_no_trace(module, submodule):
            note_that_it_repeats(node)
            note_kept(node, _kept_by(module, submodule))


def _leaves_no_trace(module: nn.Module, call: Call) -> bool:
    """Whether a submodule repeats what it gives, and does nothing else that would happen twice: no hook is called."""
    if any(vars(inner)[kind] for inner in module.modules() for kind in HOOKS):
        return False
    before, values = Attributes(module), [buffer.detach().clone() for buffer in module.buffers()]
    try:
        return (
            _repeats(call)
            and next(before.changed(), None) is None
            and next(before.written(), None) is None
            and all(map(same_bits, values, module.buffers()))
        )
    finally:
        with torch.no_grad():
            for buffer, value in zip(module.buffers(), values, strict=True):
                buffer.copy_(value)
        before.restore()


def _kept_by(module: nn.Module, call: Call) -> int:
    """The bytes that autograd keeps of what a submodule makes for itself alone, on real tensors."""
    run, given = call.prepared()
    saved: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> object:
        saved.append(tensor.untyped_storage())
        return _TOKEN

    with (
        preserved_rng(given),
        torch.set_grad_enabled(call.grad),
        autocast(call.amp, given[0].device.type),
        saved_tensors_hooks(pack, lambda token: given[0]),
    ):
        result = run()
    beside = [
        *given,
        *module.parameters(),
        *module.buffers(),
        *(t for t in tree_leaves(result) if isinstance(t, Tensor)),
    ]
    known = {tensor.untyped_storage().data_ptr() for tensor in beside}
    private = {storage.data_ptr(): storage for storage in saved if storage.data_ptr() not in known}
    return sum(rounded(storage.nbytes()) for storage in private.values())


_TOKEN = object()


def _repeats(call: Call) -> bool:
    """Whether two runs on the same, with PyTorch's random state the same, give the same bits; False for one that fails.

    One that draws from Python's or NumPy's random does not: that state is not put back where a segment runs again.
    """
    try:
        run, given = call.prepared()
        before = [tensor.detach().clone() for tensor in given]
        with preserved_rng(given):
            drawn = draws()[:2]
            first = _results(run, given, call)
            if draws()[:2] != drawn:
                return False
        with torch.no_grad():
            for tensor, value in zip(given, before, strict=True):
                tensor.copy_(value)
        with preserved_rng(given):
            second = _results(run, given, call)
    except Exception:  # whatever the user's code says of numbers that are not its own
        return False
    return len(first) == len(second) and all(map(_same, first, second))


def _results(run: Callable[[], Any], given: list[Tensor], call: Call) -> list[Any]:
    with torch.set_grad_enabled(call.grad), autocast(call.amp, given[0].device.type):
        return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(run())]


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return same_bits(a, b)
