"""Activations whose input nobody needs any more write their result over it.

Before::

    linear = torch.ops.aten.linear.default(x, self.weight)
    return torch.ops.aten.relu.default(linear)

After::

    linear = torch.ops.aten.linear.default(x, self.weight)
    return torch.ops.aten.relu_.default(linear)

Legal iff nothing reads the written storage afterwards, in the forward or for a gradient. The call is respelled, never
a submodule, which other calls may share. silu, gelu and their like are never marked: in place, autograd copies their
input to keep it. ELU is not either: in place its gradient comes from its result and rounds differently.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.matching import kept_by
from memrewrite.passes.spelling import Spelling, in_place, operand, operation, options, tensor
from memrewrite.plan.marks import NO_MARKS, Marks
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.torch_internals.autograd_nodes import is_view

# Their gradient in place, computed from the result or a mask, is bit for bit the one computed from the input.
ACTIVATIONS = ("relu", "relu6", "leaky_relu", "hardtanh", "sigmoid", "tanh", "dropout")


@dataclass(frozen=True)
class InplaceActivation:
    """Activations write over their input where no one reads it afterwards; segments of ``marks`` are respected."""

    marks: Marks = NO_MARKS
    name: ClassVar[str] = "inplace_activation"
    exact: ClassVar[bool] = True

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Respell every activation that may be in place."""
        findings = Findings()
        keeping: set[fx.Node] = set()  # nodes that, marked, keep their result where they kept their input before
        for node in effects.order:
            if not match(node, effects):
                continue
            spelling = in_place(node)
            reason = (
                check(node, effects, keeping, self.marks)
                or copied(node, spelling)
                or _overwritten(node, spelling, effects)
            )
            if reason or spelling is None:
                findings.refuse(node, reason or f"{node.name} has no in-place form.")
                continue
            spelling.put(node)
            if kept_by(node, spelling).result:
                keeping.add(node)
            findings.apply(node, f"{operation(node).rstrip('_')} writes over its input")
        return findings.finish(graph_module)


def is_activation(node: fx.Node) -> bool:
    """Whether ``node`` is a known activation."""
    return operation(node) in (*ACTIVATIONS, "elu")


def match(node: fx.Node, effects: Effects) -> bool:
    """Whether ``node`` is a known activation that puts its result in a new tensor."""
    return (
        is_activation(node) and not effects.of[node].writes and not effects.of[node].outputs <= effects.of[node].reads
    )


def check(node: fx.Node, effects: Effects, keeping: Set[fx.Node], marks: Marks = NO_MARKS) -> str | None:
    """Why ``node`` may not write over its input; None if it may. ``keeping`` are nodes marked before it."""
    source = operand(node)
    value, result = tensor(source), tensor(node)
    if value is None or result is None or value.dtype != result.dtype or value.shape != result.shape:
        return "Its result has another dtype or shape than its input."
    (key,) = effects.of[source].outputs
    return (
        unsupported(node)
        or _foreign(source, value, key, effects)
        or _read_later(node, source, key, effects)
        or _kept(node, source, key, effects, keeping)
        or _crosses_segment(node, key, effects, marks)
    )


def copied(node: fx.Node, spelling: Spelling | None) -> str | None:
    """Why autograd would copy the input to keep it, as it does for ``silu_``; None where it does not."""
    if spelling is None:
        return f"{node.name} has no in-place form."
    before, after = (kept_by(node, call).private for call in (Spelling(node.target, node.args, node.kwargs), spelling))
    return f"In place, autograd would copy {after - before} bytes to keep them." if after > before else None


def _overwritten(node: fx.Node, spelling: Spelling | None, effects: Effects) -> str | None:
    """Why its result may not be kept: it is written later, which the input that is kept otherwise survives."""
    if spelling is None or not kept_by(node, spelling).result:
        return None
    writers = (
        other for other in effects.order if other is not node and effects.of[other].writes & effects.of[node].outputs
    )
    return next((f"In place, its result would be kept, which {writer.name} writes later." for writer in writers), None)


def unsupported(node: fx.Node) -> str | None:
    """Why an activation may not be in place whatever is kept; None where that decides."""
    kind, value = operation(node), tensor(operand(node))
    if kind == "elu":
        return "In-place ELU computes its gradient from its result, which rounds differently."
    if kind == "dropout" and value is not None and value.device.type != "cpu":
        return "In-place dropout draws its mask by another kernel and keeps it in full size."
    if kind == "leaky_relu" and any(not isinstance(option, int | float) or option < 0 for option in options(node)):
        return "In-place leaky ReLU has no gradient for a negative slope."
    return None


def _foreign(source: fx.Node, value: Tensor, key: int, effects: Effects) -> str | None:
    storage = effects.storages[key]
    if storage.origin != "node":
        owner = {"input": "an input of the model", "parameter": "a parameter", "buffer": "a buffer or constant"}
        return f"Its input {source.name} lies in {owner[storage.origin]}."
    maker = effects.order[storage.producer]
    if source is not maker and not (operation(source) == "getitem" and operand(source) is maker):
        return f"Its input {source.name} is a view of {maker.name} or shares its storage."
    if value.requires_grad and is_view(value):
        return f"Its input {source.name} is a view inside {maker.name}, whose gradient would be copied."
    if value.untyped_storage().nbytes() != value.nbytes:
        return f"Its input {source.name} does not fill its storage alone (expanded or part of a larger tensor)."
    return None


def _read_later(node: fx.Node, source: fx.Node, key: int, effects: Effects) -> str | None:
    for later in effects.order[effects.position[node] + 1 :]:
        if key in effects.of[later].reads:
            if later.op == "output":
                return f"The model returns its input {source.name}."
            return f"{later.name} reads its input {source.name} later."
    return None


def _kept(node: fx.Node, source: fx.Node, key: int, effects: Effects, keeping: Set[fx.Node]) -> str | None:
    for other in effects.order:
        facts = effects.of[other]
        if facts.opaque and key in facts.reads | facts.outputs:
            return f"{other.name} is a call that may keep its input {source.name}."
        keeps = key in facts.saved or (other is source and other in keeping)
        if other is not node and keeps:
            whose = "its result" if other is source else f"{source.name}"
            return f"{other.name} keeps {whose} for its gradient."
    return None


def _crosses_segment(node: fx.Node, key: int, effects: Effects, marks: Marks) -> str | None:
    segment = marks[node.name].segment
    touching = [effects.order[effects.storages[key].producer]]
    touching += [other for other in effects.order if key in effects.of[other].reads]
    for other in touching:
        if marks[other.name].segment != segment:
            return f"Its input is also used by {other.name} in another checkpoint segment, which may run again."
    return None
