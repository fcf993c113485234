"""AOTAutograd's joint graph and how it is divided into a forward and a backward graph. Read in PyTorch 2.11 to 2.14.

A partitioner is public only as a hook of Inductor's settings; what it needs (which nodes are forward's, what counts as
a view or as fusible, how the two graphs are cut out, what the stock partitioner marks first) is private.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memrewrite.torch_internals.operators import (
    OpOverload,
    argument_names,
    is_mutable,
    named_arguments,
    returns_view,
    written_arguments,
)
from memrewrite.torch_internals.versions import private_imports, require_module

require_module("torch._functorch.partitioners")

Stock = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
SymTypes = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LARGE = 4096  # what a size counts as that nothing is known of, as PyTorch has it
_BUILTIN = {"aten", "prims", "prim"}
# What Inductor makes element by element, too, though PyTorch's partitioner does not know of it.
_ELEMENTWISE = {"slice_scatter", "select_scatter", "constant_pad_nd", "tril"}
# Reductions among what Inductor fuses: what they make is written out.
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "var", "std", "var_mean", "any", "all", "argmax", "argmin", "max", "min", "prod"),
    *("prepare_softmax_online", "_grad_sum_to_size", "sum_to_size", "norm", "linalg_vector_norm"),
}


@dataclass(frozen=True)
class Divided:
    """The nodes of a joint graph: ``forward`` those that its outputs take, ``backward`` those that need a tangent.

    ``static`` are the inputs that live as long as the model; ``info`` is PyTorch's own record of all this.
    """

    forward: frozenset[fx.Node]
    backward: frozenset[fx.Node]
    forward_outputs: tuple[fx.Node, ...]
    backward_outputs: tuple[fx.Node, ...]
    static: frozenset[fx.Node]
    info: Any


def stock_partition(joint: fx.GraphModule, inputs: Sequence[object], **kwargs: Any) -> Any:
    """What Inductor does where nobody gives it a partitioner."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def prepared(joint: fx.GraphModule, static: Sequence[int], outputs: int) -> tuple[fx.GraphModule, Divided]:
    """The joint graph without what is dead or made twice, with the marks of what must be kept, and its nodes."""
    from torch._functorch import config, partitioners

    with private_imports():
        from torch._functorch._aot_autograd.utils import _is_primal
        from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    if config.cse:
        joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()
    if partitioners.has_recomputable_ops(joint):
        joint = partitioners.cleanup_recompute_tags(joint, is_default_partition=False)
    if not getattr(config, "unsafe_allow_optimization_of_collectives", False):
        partitioners.force_save_collectives(joint)
    partitioners.force_save_effectful_ops(joint)
    partitioners.force_save_bw_mutation_src(joint)
    _save_what_reads_written(joint)
    info = partitioners.classify_nodes(joint, list(static), outputs)
    forward, backward, *_ = partitioners._extract_fwd_bwd_outputs(joint, num_fwd_outputs=outputs)
    primals = [node for node in joint.graph.nodes if _is_primal(node)]
    return joint, Divided(
        forward=frozenset(info.required_fw_nodes),
        backward=frozenset(info.tangents_closure),
        forward_outputs=tuple(node for node in forward if isinstance(node, fx.Node)),
        backward_outputs=tuple(node for node in backward if isinstance(node, fx.Node)),
        static=frozenset(primals[i] for i in static if i < len(primals)),
        info=info,
    )


def stock_saved(joint: fx.GraphModule, divided: Divided) -> frozenset[fx.Node]:
    """What the stock partitioner would hand to backward, inputs of the graph aside."""
    from torch._functorch import partitioners

    info = divided.info
    for node in reversed(joint.graph.nodes):  # as the stock partitioner does it before it chooses
        node.dist_from_bw = 0 if node.op != "output" and not info.is_required_fw(node) else int(1e9)
        if node.dist_from_bw:
            distances = (user.dist_from_bw + 1 for user in node.users if node.op != "output")
            node.dist_from_bw = min([node.dist_from_bw, *distances])
    found = partitioners.choose_saved_values_set(joint.graph, info, memory_budget=1)
    return frozenset(node for node in found if node.op not in ("placeholder", "get_attr"))


def is_ours(joint: fx.GraphModule, divided: Divided) -> bool:
    """Whether a joint graph holds nothing that only the stock partitioner knows how to divide.

    That is random numbers in user-annotated checkpoints, random state as an input, and objects that are no tensors.
    """
    from torch._functorch import partitioners

    if partitioners.has_recomputable_rng_ops(joint) or not divided.backward:
        return False
    kinds = (torch.Tensor, *SymTypes, int, float, bool, type(None))
    for node in joint.graph.find_nodes(op="placeholder"):
        known = "primals" in str(node.target) or is_tangent(node)
        if not known or not isinstance(node.meta.get("val"), kinds):
            return False
    return True


def _save_what_reads_written(joint: fx.GraphModule) -> None:
    """Mark what reads something that is written, such as a buffer before its update, as never to run again.

    Backward would make it of what is there by then, as PyTorch's own partition does.
    """
    ahead = [*_written(joint)]
    while ahead:
        for user in ahead.pop().users:
            if is_view(user):
                ahead.append(user)
            elif user.op == "call_function":
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _written(joint: fx.GraphModule) -> set[fx.Node]:
    """What the graph writes, and the inputs that AOTAutograd writes after it, as what its outputs are called tells."""
    (end,) = joint.graph.find_nodes(op="output")
    told = (getattr(each, "mutated_input", None) for each in end.meta.get("desc", ()))
    changed = [each for each in told if each is not None]
    inputs = joint.graph.find_nodes(op="placeholder")
    calls = [node for node in joint.graph.nodes if isinstance(node.target, OpOverload)]
    arguments = (each for node in calls for each in written_arguments(node.target, node.args, dict(node.kwargs)))
    found = {each for each in arguments if isinstance(each, fx.Node)}
    return found | {node for node in inputs if node.meta.get("desc") in changed}


def modules(
    joint: fx.GraphModule, saved: list[fx.Node], outputs: int, static: frozenset[fx.Node]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph where ``saved`` is handed from one to the other; the order of nodes stays."""
    from torch._functorch import partitioners

    with private_imports():
        from torch._functorch.compile_utils import raise_getitems
        from torch.utils._ordered_set import OrderedSet

    symbols = [node for node in saved if is_symbol(node)]
    tensors = [node for node in saved if not is_symbol(node)]
    pair = partitioners._extract_fwd_bwd_modules(
        joint,
        tensors,
        saved_sym_nodes=symbols,
        num_fwd_outputs=outputs,
        static_lifetime_input_nodes=OrderedSet(sorted(static, key=lambda node: node.name)),
    )
    forward, backward = map(raise_getitems, pair)
    _without_unused_draws(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    return forward, partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)


def _without_unused_draws(graph: fx.GraphModule) -> None:
    """Take out what draws numbers that nobody reads: of forward, where all it needs is there; no dead code to fx."""
    graph.graph.eliminate_dead_code(lambda node: node.is_impure() and not draws(node))
    graph.recompile()


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is a gradient that backward is given."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_symbol(node: fx.Node) -> bool:
    """Whether a node gives a size or another number, not a tensor."""
    return isinstance(node.meta.get("val"), SymTypes)


def must_save(node: fx.Node) -> bool:
    """Whether its user, or what it does, forbids to run a node again."""
    return node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE


def must_rerun(node: fx.Node) -> bool:
    """Whether its user wants a node to run again."""
    wanted = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") in wanted


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, so that it gives others when it runs again."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if isinstance(node.target, OpOverload) and "dropout_p" in argument_names(node.target):
        return named_arguments(node.target, node.args, dict(node.kwargs))["dropout_p"] != 0.0
    return True


def repeats(node: fx.Node) -> bool:
    """Whether a node may run again: a built-in operator that writes nothing and draws nothing."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__module__", "") in ("_operator", "math") or is_symbol(node)
    return node.target.namespace in _BUILTIN and not is_mutable(node.target) and not draws(node)


def is_view(node: fx.Node) -> bool:
    """Whether what a node gives lies in the storage of its first argument."""
    if not isinstance(node.target, OpOverload):
        return False
    return _table().is_view(node) or returns_view(node.target) or node.target in _views()


def fuses(node: fx.Node) -> bool:
    """Whether Inductor makes what a node gives in the kernel that reads it; not so a reduction, which it writes."""
    if not isinstance(node.target, OpOverload):
        return False
    return reads_fused(node) and _name(node) not in _REDUCTIONS and not isinstance(node.meta["val"], tuple)


def reads_fused(node: fx.Node) -> bool:
    """Whether Inductor makes what a node reads in the kernel of the node itself."""
    if not isinstance(node.target, OpOverload):
        return False
    return _table().is_fusible(node) or _name(node) in _ELEMENTWISE


def _name(node: fx.Node) -> str:
    return str(node.target.name()).partition("::")[2].partition(".")[0] if isinstance(node.target, OpOverload) else ""


@cache
def _table() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


@cache
def _views() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset({aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.detach.default})


def number(size: int | torch.SymInt) -> int:
    """A size as it is while the graph is traced; nothing is assumed by asking."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return _LARGE if hint is None else int(hint)


def count_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor as its sizes are while the graph is traced."""
    return number(tensor.numel()) * tensor.element_size()
