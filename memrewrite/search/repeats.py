"""Which calls that nobody looks into give the same twice: tried on real tensors, as only those may run again."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.weight_norm import WeightNorm

from memrewrite.costs.calls import Call, call_of
from memrewrite.observe.effects import note_runs, observe
from memrewrite.observe.opaque_calls import is_opaque, names_of_calls
from memrewrite.runtime.differences import joined
from memrewrite.runtime.guards import hooks_of
from memrewrite.simulate.fake.as_seen import note_kept
from memrewrite.state.attributes import Attributes
from memrewrite.state.bits import same_bits
from memrewrite.state.random_state import draws, preserved_everywhere, preserved_rng
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.pytrees import tensors_in, tree_leaves
from memrewrite.torch_internals.spread import local_part, parts_of, spreads
from memrewrite.workload.step import Step, autocast
from memrewrite.workload.surroundings import surroundings_put_back


@dataclass(frozen=True)
class _Runs:
    """Whether two runs gave the same bits, and whether they drew from PyTorch's generators."""

    repeat: bool
    draw: bool = False


@preserved_everywhere()
def note_what_repeats(graph_module: fx.GraphModule, example: list[Any], step: Step, once: Collection[str] = ()) -> None:
    """Say of each call that nobody looks into, given a tensor or number per placeholder, whether it may run again.

    Submodules with the paths ``once`` may not.

    The random state is as it was afterwards: the numbers that the calls are tried on are drawn from it. So is what the
    calls write to beside the model.
    """
    nodes = graph_module.graph.nodes
    functions = [node for node in nodes if node.op != "call_module" and is_opaque(node)]
    submodules = [node for node in nodes if node.op == "call_module" and node.target not in once]
    if not functions and not submodules:
        return
    effects = observe(graph_module, example, step.amp, target=step.target)
    with surroundings_put_back((graph_module,)):  # what runs is the user's code
        told: dict[str, _Runs] = {}
        for node in functions:
            call = call_of(node, effects.of[node], step.amp)
            text = "" if call is None else call.text
            if text not in told:
                told[text] = _Runs(False) if call is None else _twice(call)
            note_runs(node, told[text].repeat, told[text].draw)
        known = dict(_whole_numbers(graph_module, example))
        for node in submodules:
            module = graph_module.get_submodule(str(node.target))
            submodule = call_of(node, effects.of[node], step.amp, module, known)
            if submodule is not None and _leaves_no_trace(module, submodule):
                note_runs(node, repeats=True, draws=effects.of[node].random or not _is_layer(module))
                note_kept(node, _kept_by(module, submodule))


def _whole_numbers(graph_module: fx.GraphModule, example: list[Any]) -> Iterator[tuple[fx.Node, Tensor]]:
    """The inputs that may be lengths or places, and what they are in the example."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, example, strict=True):
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            yield node, value


def names_of_operators(graph_module: fx.GraphModule) -> str:
    """A sentence about the operators that others registered and the kernels launched, "" where there are none."""
    names = sorted(names_of_calls(graph_module.graph))
    return f"What stays a call as the model makes it: {', '.join(names)}." if names else ""


def _leaves_no_trace(module: nn.Module, call: Call) -> bool:
    """Whether a submodule repeats what it gives, and does nothing else that would happen twice.

    No hook is called but that of ``weight_norm``, which makes the same weight again, and those that spread what the
    submodule is given over a mesh and gather what it gives.
    """
    hooks = [(path, hook) for path, inner in module.named_modules() for hook in hooks_of(inner)]
    if not all(isinstance(hook, WeightNorm) or spreads(hook) for _, hook in hooks):
        return False
    normed = {joined(path, hook.name) for path, hook in hooks if isinstance(hook, WeightNorm)}
    tensors = [local_part(tensor) for tensor in (*module.parameters(), *module.buffers())]
    before, values = Attributes(module), [tensor.detach().clone() for tensor in tensors]
    try:
        return (
            _twice(call).repeat
            and all(path in normed for path, _ in before.changed())
            and next(before.written(), None) is None
            and all(map(same_bits, values, tensors))
        )
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if tensor.shape != value.shape:  # the run gave it a size
                    tensor.data = value
                elif not same_bits(tensor, value):
                    tensor.copy_(value)
        before.restore()


def _is_layer(module: nn.Module) -> bool:
    """Whether it is made of layers of PyTorch's, which draw for all values or for none."""
    return all(type(inner).__module__.startswith("torch.nn.modules.") for inner in module.modules())


def _kept_by(module: nn.Module, call: Call) -> int:
    """The bytes that autograd keeps of what a submodule makes for itself alone, on real tensors."""
    run, given = call.prepared()
    saved: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> object:
        saved.extend(part.untyped_storage() for part in parts_of(tensor))
        return _TOKEN

    with (
        torch.set_grad_enabled(call.grad),
        autocast(call.amp, given[0].device.type),
        saved_tensors_hooks(pack, lambda token: given[0]),
    ):
        result = run()
        _ = [leaf.clone() for leaf in tensors_in(result)]  # what is sent has to arrive
    beside = [
        *given,
        *module.parameters(),
        *module.buffers(),
        *tensors_in(result),
    ]
    known = {part.untyped_storage().data_ptr() for tensor in beside for part in parts_of(tensor)}
    private = {storage.data_ptr(): storage for storage in saved if storage.data_ptr() not in known}
    return sum(rounded(storage.nbytes()) for storage in private.values())


_TOKEN = object()


def _twice(call: Call) -> _Runs:
    """Whether two runs on the same, with PyTorch's random state the same, give the same bits; one that fails does not.

    One that draws from Python's or NumPy's random does not: that state is not put back where a segment runs again.
    """
    try:
        run, given = call.prepared()
        before = [tensor.detach().clone() for tensor in given]
        with preserved_rng(given):
            there = _drawn(given)
            first = _results(run, given, call)
            now = _drawn(given)
        if now[:2] != there[:2]:
            return _Runs(False)
        with torch.no_grad():
            for tensor, value in zip(given, before, strict=True):
                tensor.copy_(value)
        with preserved_rng(given):
            second = _results(run, given, call)
    except Exception:  # whatever the user's code says of numbers that are not its own
        return _Runs(False)
    return _Runs(len(first) == len(second) and all(map(_same, first, second)), now != there)


def _drawn(given: list[Tensor]) -> list[Any]:
    """What of the random state there is to compare, the device's at the end."""
    devices = dict.fromkeys(tensor.device for tensor in given if tensor.is_cuda)
    return [*draws(), *(torch.cuda.get_rng_state(device).tolist() for device in devices)]


def _results(run: Callable[[], Any], given: list[Tensor], call: Call) -> list[Any]:
    with torch.set_grad_enabled(call.grad), autocast(call.amp, given[0].device.type):
        leaves = [*tree_leaves(run()), *(given if call.writes else ())]
    return [local_part(leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return same_bits(a, b)
