"""The floating-point operations of products, by PyTorch's own formulas but for attention.

Those of PyTorch 2.11 refuse fewer heads of keys than of queries, and know no attention of the CPU.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Two products over all pairs of positions."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """The first product again, and two gradients of each."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
FLOPS: dict[Any, Any] = {
    **flop_registry,
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kind}"): _attention for kind in _KINDS},
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_backward"): _attention_backward for kind in _KINDS},
}
"""By packet of overloads: what counts the operations of a call, given its arguments and ``out_val``."""
