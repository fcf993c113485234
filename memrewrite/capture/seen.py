"""What a run of forward calls, where hazards among that are, and what it asks of tensors."""

import itertools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memrewrite.capture.autocasts import autocast_now
from memrewrite.capture.gradients import QUESTIONS
from memrewrite.records.lines import in_checkpoint, is_users, line_now
from memrewrite.state.random_state import RandomState
from memrewrite.torch_internals.custom_functions import Forward
from memrewrite.torch_internals.pytrees import tensors_in, tree_leaves

_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_CASTS = (Tensor.to, Tensor.type_as, Tensor.cpu, Tensor.cuda)  # to a type that is told, or that a tensor has
_LAYOUTS = (Tensor.is_contiguous, Tensor.stride, Tensor.dim_order)
_TYPES = (Tensor.dtype.__get__, Tensor.type, Tensor.is_floating_point)  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LET_TRAIN = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_FunctionCall = tuple[Any, list[str], str]  # the function, its plain arguments and how many tensors, the place


class Watch(TorchFunctionMode):
    """Sees every torch function of a rehearsal, and in which modes it runs.

    ``places`` holds where something on the list of what is refused happened, a write to one of ``buffers`` (by id)
    under a checkpoint among it; ``nested`` says where modes are in force that export loses, "" if nowhere; ``regions``
    is that of ``autocast_regions``. ``output`` is what forward returned, ``reads`` what it read, ``asks_of_gradients``
    whether it asked a tensor whether it needs one, ``asks_of_layouts`` how one lies in memory, ``asks_of_types``
    which type one has that is no parameter, ``derives`` where it took some that can be differentiated again.
    """

    def __init__(self, buffers: set[int], regions: list[bool]) -> None:
        super().__init__()
        self._buffers, self._regions, self._looking = buffers, regions, True
        self.places: dict[str, list[str]] = {}
        self.nested = self.derives = ""
        self.output: Any = None
        self.reads: Any = None
        self.operators: list[str] = []
        self.asks_of_gradients = self.asks_of_layouts = self.asks_of_types = False
        self._calls: list[_FunctionCall] = []
        self._computing: list[_FunctionCall] = []  # those of them that gave numbers with fractions
        self.leaves: list[tuple[Tensor, str]] = []  # which it let require a gradient
        self._cache = torch.is_autocast_cache_enabled()
        self._outside = (torch.is_inference_mode_enabled(), torch.initial_seed(), autocast_now(), _attention())

    def unseen(self, kind: type, forward: Forward, context: Any, args: tuple[Any, ...]) -> Any:
        """What a custom Function gives, without a look at how; nor does it draw for anybody else."""
        drawn, self._looking = RandomState(), False
        try:
            return forward(context, *args)
        finally:
            self._looking = True
            drawn.restore()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._looking:
            return func(*args, **kwargs)
        theirs = is_users(sys._getframe(1).f_code.co_filename)
        if func in QUESTIONS:
            self.asks_of_gradients |= theirs
            return func(*args, **kwargs)
        self.asks_of_layouts |= func in _LAYOUTS
        inference, seed, autocast, attention = self._outside
        line = line_now()
        happens = {
            "hook": getattr(func, "__name__", "") in _TENSOR_HOOKS,
            "inference": torch.is_inference_mode_enabled() != inference,
            "seed": torch.initial_seed() != seed,
            "generator": kwargs.get("generator") is not None,
            "data": func == _SET_DATA,
            "offset": theirs and func is Tensor.storage_offset,
            "gradient": func in _GRADIENTS and not kwargs.get("create_graph"),
        }
        for what in (what for what, happened in happens.items() if happened):
            self.places.setdefault(what, []).append(line)
        self.derives = self.derives or line * (func in _GRADIENTS)
        if not torch.is_grad_enabled() and any(self._regions) and autocast_now() != autocast:
            self.nested = self.nested or f"no_grad inside of autocast at {line}"  # it keeps the outer one only
        if torch.is_autocast_cache_enabled() != self._cache:
            self.nested = self.nested or f"autocast without its cache at {line}"
        if _attention() != attention:
            self.nested = self.nested or f"the choice of attention kernels at {line}"
        leaves = tree_leaves((args, kwargs))
        plain = [repr(leaf) for leaf in leaves if isinstance(leaf, int | float | str | torch.dtype)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain.append(f"{len(tensors)} tensors")
        if func in _CASTS and not any(isinstance(leaf, torch.dtype) for leaf in leaves):
            plain.append(repr(tensors[-1].dtype))  # which the graph names
            self.asks_of_types = True
        self.asks_of_types |= func in _TYPES and not isinstance(args[0], nn.Parameter)
        self._calls.append((func, plain, line))
        versions = [(value, value._version) for value in args if id(value) in self._buffers]
        trained = func in _LET_TRAIN and args[0].requires_grad
        result = func(*args, **kwargs)
        if theirs and not trained and (args[0].requires_grad if func in _LET_TRAIN else kwargs.get("requires_grad")):
            self.leaves.append((args[0] if func in _LET_TRAIN else result, line))
        if trained and not args[0].requires_grad:
            self.places.setdefault("frozen", []).append(line)
        if any(leaf.is_floating_point() for leaf in tensors_in(result)):
            self._computing.append(self._calls[-1])
        if any(buffer._version != version for buffer, version in versions) and in_checkpoint():
            self.places.setdefault("twice", []).append(line_now())
        return result

    def differs(self, other: "Watch", computing: bool = False) -> str:
        """The place of the first call that the other run made differently, "" if both are the same.

        With ``computing``, calls do not count that give integers or truth values only.
        """
        calls = (self._computing, other._computing) if computing else (self._calls, other._calls)
        for mine, theirs in itertools.zip_longest(*calls):
            if mine is None or theirs is None or mine[:2] != theirs[:2]:
                return (mine or theirs)[2] or "a place unknown"
        return ""


def _attention() -> tuple[bool, ...]:
    """Which kernels scaled_dot_product_attention may use, as ``torch.nn.attention.sdpa_kernel`` sets."""
    kinds = torch.backends.cuda
    return kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.math_sdp_enabled()
