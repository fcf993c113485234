"""In-place operations on activations become out-of-place, so that later passes see values and not histories.

Before::

    linear = torch.ops.aten.linear.default(x, self.weight)
    relu = torch.ops.aten.relu_.default(linear)
    return linear + relu

After::

    linear = torch.ops.aten.linear.default(x, self.weight)
    relu = torch.ops.aten.relu.default(linear)
    return relu + relu

Writes to parameters and buffers are state and stay as they are.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from memrewrite.observe.effects import Effects
from memrewrite.passes.matching import kept_by
from memrewrite.passes.spelling import Spelling, only_metadata, operand, operation, out_of_place, tensor
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.torch_internals.autograd_nodes import is_view

# Their gradient asks only on which side of a bound a value lies, so input and result give the same one, bit for bit.
BY_SIGN = ("hardtanh", "leaky_relu", "relu6")


@dataclass(frozen=True)
class Functionalize:
    """In-place operations on activations become out-of-place; later uses see the new value."""

    name: ClassVar[str] = "functionalize"
    exact: ClassVar[bool] = True

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite every in-place operation on an activation that has no living alias."""
        findings = Findings()
        for node in effects.order:
            if not match(node, effects):
                continue
            spelling = out_of_place(node)
            if (reason := check(node, spelling, effects)) or spelling is None:
                findings.refuse(node, reason or "")
                continue
            rewrite(node, spelling, effects)
            findings.apply(node, f"{node.name} writes a new tensor instead of its input")
        return findings.finish(graph_module)


def match(node: fx.Node, effects: Effects) -> bool:
    """Whether ``node`` writes bytes of an activation or an input of the model, other than by a metadata change.

    What a call writes that nobody looks into, a kernel's launch say, is no operation that could be spelled otherwise.
    """
    facts = effects.of[node]
    written = {effects.storages[key].origin for key in facts.writes}
    return bool(written & {"node", "input"}) and not facts.opaque and not only_metadata(node)


def check(node: fx.Node, spelling: Spelling | None, effects: Effects) -> str | None:
    """Why ``node`` has to stay in place; None if it need not."""
    target = operand(node)
    value = tensor(target)
    if spelling is None or value is None:
        return f"{node.name} has no out-of-place form."
    key = _storage(target, effects)
    if effects.storages[key].origin != "node":
        return f"{node.name} writes the caller's own tensor, which has to stay written."
    if node.op == "call_method" and effects.of[node].random:
        return f"{node.name} fills a tensor with random numbers and computes nothing from it."
    if effects.of[node].random and value.device.type != "cpu":
        return f"Out of place, {node.name} would draw its random numbers by another kernel."
    same = _same_tensor(target)
    for alias in effects.order[: effects.position[node]]:
        if key in effects.of[alias].outputs and _same_tensor(alias) is not same:
            late = [user.name for user in alias.users if effects.position[user] > effects.position[node]]
            if late:
                return f"Its storage is also seen through {alias.name}, which {late[0]} reads later."
    return _rearranged(node, value, effects.order[effects.storages[key].producer]) or _differs(node, target, spelling)


def rewrite(node: fx.Node, spelling: Spelling, effects: Effects) -> None:
    """Spell ``node`` out of place and let every later use of the written tensor read the new one."""
    target = operand(node)
    key, written = _storage(target, effects), _same_tensor(target)
    spelling.put(node)
    for alias in effects.order[: effects.position[node]]:
        if key in effects.of[alias].outputs and _same_tensor(alias) is written:
            for user in list(alias.users):
                if effects.position[user] > effects.position[node]:
                    user.replace_input_with(alias, node)


def _storage(node: fx.Node, effects: Effects) -> int:
    return next(iter(effects.of[node].outputs))


def _same_tensor(node: fx.Node) -> fx.Node:
    """The node that first gave the very tensor ``node`` gives: in-place operations return what they were given."""
    while out_of_place(node) is not None and isinstance(source := operand(node), fx.Node):
        node = source
    return node


def _rearranged(node: fx.Node, value: Tensor, maker: fx.Node) -> str | None:
    """Written in place, a view passes on a gradient that lies in memory as the whole tensor does.

    Laid out otherwise the gradient has the same values, but a product of it rounds differently.
    """
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    if is_view(value) and not whole and (value.is_floating_point() or value.is_complex()):
        return f"{node.name} writes a view inside {maker.name}, whose gradient would have another memory format."
    return None


def _differs(node: fx.Node, target: fx.Node, spelling: Spelling) -> str | None:
    """Run the out-of-place form on the observed fake tensors: its result must look like the tensor that was written."""
    args, kwargs = map_arg((spelling.args, spelling.kwargs), _trained)
    with torch.enable_grad():
        result, value = spelling.function(*args, **kwargs), tensor(target)
    if value is None or (result.dtype, result.shape, result.stride()) != (value.dtype, value.shape, value.stride()):
        return f"Out of place, {node.name} would have another dtype, shape or memory format."
    if result.grad_fn is not None and "NotImplemented" in result.grad_fn.name():
        return f"Out of place, {node.name} has no gradient."
    calls = Spelling(node.target, node.args, node.kwargs), spelling
    here, there = (kept_by(node, call, trained=True) for call in calls)  # whoever calls the model may train its inputs
    if here.result and not there.result and operation(node).rstrip("_") not in BY_SIGN:
        return f"In place, {node.name} takes its gradient from its result; from its input it would round differently."
    return None


def _trained(node: fx.Node) -> Any:
    """What was observed, with a gradient if it may have one: whoever calls the model may train its inputs."""
    value = tensor(node)
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return node.meta["val"]
    return value.detach().requires_grad_()
