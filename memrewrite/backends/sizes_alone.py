"""What nothing but its sizes is read of is not kept for that, nor made again.

The backward of an average pool is given what was pooled, and reads none of it: Inductor's kernel computes with sizes.
Kept for backward it would live through all of that, as the code lets go of a tensor after a kernel that reads it. An
expanded number has the same sizes and is never written.
"""

import math

import torch
from torch import fx

from memrewrite.torch_internals.operators import OpOverload

_aten = torch.ops.aten
# By the operator the most elements that a window may have: with more of them Inductor calls PyTorch's own kernel.
_POOLS: dict[OpOverload, int] = {_aten.avg_pool2d_backward.default: 25, _aten.avg_pool3d_backward.default: 125}


def give_sizes_alone(joint: fx.GraphModule) -> None:
    """Give such nodes another tensor of the same sizes, where these are numbers."""
    for target, most in _POOLS.items():
        for node in joint.graph.find_nodes(op="call_function", target=target):
            gradient, pooled, window, *rest = node.args
            value = pooled.meta["val"]
            if math.prod(window) > most or not all(isinstance(size, int) for size in value.shape):
                continue
            with joint.graph.inserting_before(node):
                number = joint.graph.call_function(
                    _aten.full.default, ([], 0), {"dtype": value.dtype, "device": value.device}
                )
                number.meta = {"val": value.new_zeros([])}
                expanded = joint.graph.call_function(_aten.expand.default, (number, [*value.shape]))
                expanded.meta = {"val": number.meta["val"].expand(value.shape)}
            node.args = (gradient, expanded, window, *rest)
