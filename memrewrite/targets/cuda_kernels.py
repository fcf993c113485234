"""A CUDA step on tensors that lie on the CPU: where CUDA runs other operators, fake tensors run those.

A build of PyTorch without CUDA cannot run autograd on fake CUDA tensors, so a step for CUDA is simulated on fake CPU
tensors, and four things are put in place of what the CPU does:

- dropout keeps a mask of one byte per element (``native_dropout``);
- attention runs as one kernel that keeps q, k, v, the result and a float32 log-sum-exp per row: flash attention in
  half precision without a mask, memory-efficient attention otherwise, the plain formula where neither takes the inputs;
- ``rms_norm`` is one operator that keeps its input and a float32 factor per row;
- autocast casts the operators that CUDA's autocast casts (``aten/src/ATen/autocast_mode.h``).

Optimizers take their foreach kernels, which hold temporaries for all parameters at once.
What operators take while they run is in ``cuda_scratch``. Not modelled: recurrent layers of cuDNN.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from memrewrite.torch_internals.kernels import (
    Kernel,
    autocast_operators,
    below_autograd,
    beyond_autocast,
    kernels_in_this_thread,
    without_autocast,
)
from memrewrite.torch_internals.operators import OpOverload, named_arguments, schema_name
from memrewrite.torch_internals.pytrees import tree_map

_TURN = threading.RLock()
_ACTIVE: list[bool] = []
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256

# CUDA's autocast casts these to half precision and the CPU's does not (it casts the products they are made of).
_LOWER = {"addmv", "addr", "chain_matmul", "convolution", "_convolution", "einsum", "linalg_multi_dot", "mv"}
# These are asked for a float32 result, which needs no float32 copy of what they are given.
_FLOAT32_RESULT = {"cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm"}
_FLOAT32_RESULT |= {"log_softmax.int", "prod", "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList"}
_FLOAT32_RESULT |= {"norm.Scalar", "norm.ScalarOpt_dim"}
# These are computed in the widest type they are given.
_WIDEST = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add"}
_WIDEST |= {"tensordot", "vdot"}
# The same on both, or in several parts on the CPU, of which the products are cast there.
_ALIKE = {"_addmm_activation", "_native_multi_head_attention", "_scaled_dot_product_flash_attention"}
_ALIKE |= {"_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "binary_cross_entropy", "conv1d.padding", "conv2d.padding"}
_ALIKE |= {"conv3d.padding", "cudnn_convolution", "cudnn_convolution_transpose", "gru_cell", "lstm_cell"}
_ALIKE |= {"mkldnn_rnn_layer", "rnn_relu_cell", "rnn_tanh_cell"}


@contextmanager
def as_cuda() -> Iterator[None]:
    """Let fake CPU tensors in this thread run what CUDA tensors run; for simulating only, undone afterwards.

    What is substituted runs on fake tensors alone: the CPU has no such kernels.
    """
    with _TURN:  # one thread at a time, as registrations hold for all
        if _ACTIVE:
            yield
            return
        _ACTIVE.append(True)
        try:
            with kernels_in_this_thread(_kernels()):
                yield
        finally:
            _ACTIVE.clear()


def _kernels() -> Mapping[tuple[str, str], Kernel]:
    """What runs instead, by operator and dispatch key."""
    found: dict[tuple[str, str], Kernel] = {
        ("dropout", "AutogradCPU"): _dropout,
        ("scaled_dot_product_attention", "AutogradCPU"): _attention,
        ("rms_norm", "AutogradCPU"): _rms_norm,
    }
    ours, theirs = autocast_operators("cpu"), autocast_operators("cuda")
    for name in sorted((ours | theirs) - _ALIKE):
        rule = _autocast_rule(name, name in ours, name in theirs)
        if rule is not None:
            found[name, "AutocastCPU"] = rule
    return found


def _autocast_rule(name: str, ours: bool, theirs: bool) -> Kernel | None:
    """What CUDA's autocast does to an operator, None where the CPU's does the same."""
    if not theirs:
        return beyond_autocast
    for names, rule in ((_FLOAT32_RESULT, _float32_result), (_WIDEST, _widest)):
        if name in names:
            return rule
    if ours:
        return None
    return _lower if name in _LOWER else _float32


def _dropout(operator: OpOverload, keys: Any, args: Any, kwargs: Any) -> Any:
    given = named_arguments(operator, args, kwargs)
    source, chance = given["input"], given["p"]
    if not given["train"] or chance == 0 or source.numel() == 0:
        return source
    if chance == 1:
        return operator.decompose(*args, **kwargs)
    return torch.native_dropout(source, chance, True)[0]


def _rms_norm(operator: OpOverload, keys: Any, args: Any, kwargs: Any) -> Any:
    given = named_arguments(operator, args, kwargs)
    source, weight = given["input"], given["weight"]
    if source.is_complex() or (weight is not None and weight.dtype != source.dtype):
        return operator.decompose(*args, **kwargs)
    return _RmsNorm.apply(source, given["normalized_shape"], weight, given["eps"])  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    """The operator differentiated whole, as it is where a device has a kernel for it; the CPU has none."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Tensor:
        with below_autograd():
            result, factors = torch.ops.aten._fused_rms_norm.default(source, shape, weight, eps)
        ctx.save_for_backward(source, weight, factors)
        ctx.shape = shape
        return cast(Tensor, result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        source, weight, factors = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        whole = torch.ops.aten._fused_rms_norm_backward.default
        of_source, of_weight = whole(gradient, source, ctx.shape, factors, weight, wanted)
        return of_source, None, of_weight, None


def _attention(operator: OpOverload, keys: Any, args: Any, kwargs: Any) -> Any:
    given = named_arguments(operator, args, kwargs)
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    p, causal, scale = given["dropout_p"], given["is_causal"], given["scale"]
    if _takes_flash(query, key, value, mask, causal, given["enable_gqa"]):
        padded = [_padded(each) for each in (query, key, value)]
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash(*padded, p, causal, False, scale=scale)[0][..., : value.shape[-1]]
    if _takes_efficient(query, key, value, mask):
        grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        bias = None if mask is None else _bias(mask, query, key)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        return efficient(query, key, value, bias, grad, p, causal, scale=scale)[0]
    plain = torch.ops.aten._scaled_dot_product_attention_math.default
    mask = _additive(mask, query.dtype)
    return plain(query, key, value, mask, p, causal, scale=scale, enable_gqa=given["enable_gqa"])[0]


def _takes_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, shared: bool) -> bool:
    """``can_use_flash_attention`` in ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``."""
    if mask is not None or query.dtype not in _HALF or not torch.backends.cuda.flash_sdp_enabled():
        return False
    same_depth = query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_HEAD_DIM
    square = not causal or query.shape[-2] == key.shape[-2]
    return same_depth and square and _regular(query, key, value, shared)


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """``can_use_mem_efficient_attention`` there, for compute capability 8.0 and later."""
    if mask is not None and mask.stride(-1) != 1:
        return False
    if query.dtype not in (*_HALF, torch.float32) or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    step = 16 // query.element_size()
    same_depth = query.shape[-1] == key.shape[-1]
    aligned = query.shape[-1] % step == 0 and value.shape[-1] % step == 0
    return same_depth and aligned and _regular(query, key, value, False)


def _regular(query: Tensor, key: Tensor, value: Tensor, shared: bool) -> bool:
    """What both kernels ask: four dense dimensions, one type and batch, heads alike or, if ``shared``, a multiple."""
    given = (query, key, value)
    if any(each.dim() != 4 or each.dtype != query.dtype or each.shape[0] != query.shape[0] for each in given):
        return False
    if any(each.stride(-1) != 1 or each.numel() == 0 for each in given):
        return False
    heads, keys, values = (each.shape[1] for each in given)
    return keys == values and (heads % keys == 0 if shared else heads == keys)


def _padded(tensor: Tensor) -> Tensor:
    """With the last dimension a multiple of 8, as flash attention takes it."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 8)) if tensor.shape[-1] % 8 else tensor


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``preprocess_mask`` in ``aten/src/ATen/native/transformers/attention.cpp``: rows aligned to 8, then expanded."""
    bias = _additive(mask, query.dtype)
    if bias.stride(-1) != 1 or any(stride % 8 for stride in bias.stride()[:-1]):
        bias = torch.nn.functional.pad(bias, (0, 8 - bias.shape[-1] % 8))[..., : bias.shape[-1]]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _lower(operator: OpOverload, keys: Any, args: Any, kwargs: Any) -> Any:
    return _cast_to(torch.get_autocast_dtype("cpu"), operator, args, kwargs)


def _float32(operator: OpOverload, keys: Any, args: Any, kwargs: Any) -> Any:
    return _cast_to(torch.float32, operator, args, kwargs)


def _widest(operator: OpOverload, keys: Any, args: Any, kwargs: Any) -> Any:
    found: list[torch.dtype] = []
    tree_map(lambda leaf: found.append(leaf.dtype) if _castable(leaf) else None, (args, kwargs))
    widest = torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cpu")
    return _cast_to(widest, operator, args, kwargs)


def _float32_result(operator: OpOverload, keys: Any, args: Any, kwargs: Any) -> Any:
    """Asks for float32 unless another type is asked for; softmax of float16 casts as it reads, like CUDA's kernel."""
    if not _castable(args[0]):
        return beyond_autocast(operator, keys, args, kwargs)
    given = named_arguments(operator, args, kwargs)
    with without_autocast():
        if schema_name(operator) == "aten::norm":
            dims = [given["dim"], given["keepdim"]] if "dim" in given else [[], False]
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(given["self"], given["p"], *dims, dtype=torch.float32)
        fused = _FUSED_SOFTMAX.get(schema_name(operator))
        if fused is not None and given["dtype"] is None and given["self"].dtype is torch.float16:
            return fused(given["self"], given["dim"], True)
        asked = torch.float32 if given["dtype"] is None else given["dtype"]
        return operator(**{**given, "dtype": asked})


_FUSED_SOFTMAX: dict[str, Callable[..., Tensor]] = {
    "aten::softmax": torch.ops.aten._softmax.default,
    "aten::log_softmax": torch.ops.aten._log_softmax.default,
}


def _cast_to(dtype: torch.dtype, operator: OpOverload, args: Any, kwargs: Any) -> Any:
    with without_autocast():
        args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _castable(leaf) else leaf, (args, kwargs))
        return operator(*args, **kwargs)


def _castable(leaf: Any) -> bool:
    """What autocast casts: floating-point tensors, but not those in double precision."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
