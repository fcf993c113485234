"""Batch normalizations that need not run again with their segment: it applies the statistics of the forward pass.

See ``runtime.batch_norm``. The ReLU after one costs nothing more then.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from memrewrite.costs import Roofline
from memrewrite.costs.calls import Argument, Call
from memrewrite.observe.effects import Effects
from memrewrite.plan.marks import Marks
from memrewrite.runtime.batch_norm import apply_statistics, as_matrix
from memrewrite.targets.transients import like

_TRAINING = 5  # the position of that argument


def keeps_statistics(node: fx.Node) -> bool:
    """Whether ``node``, observed, is a batch normalization for which ``runtime.batch_norm`` may have a formula."""
    if node.target is not torch.ops.aten.batch_norm.default or node.args[_TRAINING] is not True:
        return False
    given = [value.meta.get("val") if isinstance(value, fx.Node) else None for value in node.args[:3]]
    tensors = [value for value in given if isinstance(value, Tensor)]
    return len(tensors) == len(given) and as_matrix(tensors[0]) is not None


def rectifier(node: fx.Node) -> fx.Node | None:
    """The ReLU that alone uses what ``node`` gives, which can be applied with the statistics; None without one."""
    users = list(node.users)
    alone = len(users) == 1 and users[0].target in (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
    return users[0] if alone else None


def runs_again_with(node: fx.Node, marks: Marks) -> fx.Node | None:
    """The rectifier of ``node`` where it writes over its input in the same segment: the two run again as one."""
    relu = rectifier(node)
    if relu is None or relu.target is not torch.ops.aten.relu_.default:
        return None
    return relu if marks[relu.name].segment == marks[node.name].segment else None


def in_one_with(relu: fx.Node, marks: Marks) -> fx.Node | None:
    """The normalization that ``relu`` runs again in one with, whose statistics are marked as kept; None without one."""
    source = relu.args[0] if relu.args else None
    if not isinstance(source, fx.Node) or marks[source.name].statistics is None:
        return None
    return source if runs_again_with(source, marks) is relu else None


def found(effects: Effects) -> dict[fx.Node, fx.Node | None]:
    """Each batch normalization that keeps its statistics, with its rectifier."""
    return {node: rectifier(node) for node in effects.order if keeps_statistics(node)}


def call_again(node: fx.Node, rectified: bool) -> Call:
    """What ``node`` is as it applies its statistics, in place of which other tensors like its weight stand."""
    x, weight = (Argument(i, like(given.meta["val"]), False) for i, given in enumerate(node.all_input_nodes[:2]))
    args = (x, [weight, weight], weight, weight, 0, rectified)
    return Call(f"apply_statistics {args!r}", apply_statistics, args, {}, None, False, False, lasting=False)


def again_ms(normalizations: Mapping[fx.Node, fx.Node | None], roofline: Roofline) -> dict[fx.Node, float]:
    """What it takes to run each normalization again, which reads and writes as much as it gives; rectifiers nothing."""
    rectifiers = {relu: 0.0 for relu in normalizations.values() if relu is not None}
    return rectifiers | {node: roofline.ms((0, 2 * node.meta["val"].nbytes), None) for node in normalizations}
