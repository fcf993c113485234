"""Tensors without data, and the modes that see every operator: how a step is observed without memory.

They have no public spelling, though ``torch.distributed``, ``torch.export`` and PyTorch's own memory tools are built on
them. Read in PyTorch 2.11 to 2.15.
"""

import contextlib
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from memrewrite.torch_internals.operators import OpOverload, named_arguments, schema_name
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    # The shape of a grouped matrix product, and the rules that fake tensors follow before all others.
    from torch._functorch import config
    from torch._meta_registrations import _create_grouped_mm_output_tensor as _grouped_mm_output
    from torch._prims_common import suggest_memory_format as suggested_format  # which C++ asks of each tensor itself
    from torch._subclasses.fake_impls import op_implementations_dict as _FAKE_RULES  # noqa: N812
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
        is_fake,
    )
    from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors
    from torch._subclasses.functional_tensor import FunctionalTensor  # what fake ones are wrapped in while exported
    from torch.utils._python_dispatch import TorchDispatchMode

require(
    "_C._DisableTorchDispatch",
    "_functorch.config.fake_tensor_allow_unsafe_data_ptr_access",
    "_subclasses.FakeTensor",
    "_subclasses.fake_tensor.FakeTensorConverter.add_constant_storage_mapping",
    "_subclasses.fake_tensor.FakeTensorConverter.set_tensor_memo",
    "_subclasses.meta_utils.MetaConverter",
    "_subclasses.meta_utils.MetaTensorDescriber.get_storage_id",
    "ops.aten._grouped_mm.default._schema",
)

__all__ = [
    "FAKE_TENSOR_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "NoDataError",
    "TorchDispatchMode",
    "as_parameter",
    "asks_for_memory",
    "asks_for_numbers",
    "fake_met",
    "fake_number",
    "fake_of",
    "has_no_storage",
    "higher_order",
    "in_place_of_modes",
    "is_bare",
    "is_fake",
    "is_of_a_class",
    "known_as_real",
    "lacks_fake_rule",
    "met_by",
    "real_rules_on_fake_tensors",
    "real_tensors",
    "suggested_format",
    "without_data",
    "without_fake_gradients",
]


class NoDataError(Exception):
    """A fake tensor was asked for its memory, or an operator has no rule for it, which PyTorch raises as anything."""


# What fake tensors raise where a result depends on data, or an operator knows no shapes.
FAKE_TENSOR_ERRORS: tuple[type[Exception], ...] = (
    NoDataError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def as_parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """A new fake tensor itself as a parameter; of others what ``nn.Parameter`` makes, which detaches them first.

    ``nn.Parameter.__new__`` marks what it has detached just so, and to detach takes as long as to make the fake.
    """
    if type(tensor) is not FakeTensor:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    parameter: Any = tensor.requires_grad_(requires_grad)
    parameter._is_param = True
    return parameter


class FakeTensorMode(_FakeTensorMode):
    """Makes tensors that raise when they are asked for the place of their data.

    PyTorch's own say 0, and a kernel that is launched on that ruins the CUDA context of the process.
    """

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        # PyTorch finds what higher-order operators do, as launches in a ``triton_op``, by the very class of the mode.
        self.__class__ = _FakeTensorMode  # type: ignore[assignment]


def fake_of(tensor: torch.Tensor, mode: FakeTensorMode, alone: bool = False) -> torch.Tensor:
    """The fake of a real tensor that has no gradient, on the storage of those that share its own.

    It is ``mode.from_tensor`` for a tensor that nobody has the fake of yet, in less than half of the time; but one that
    is the start of a larger storage has all of that, of which PyTorch takes no more than the start. A part of a larger
    storage that stands ``alone`` has none of the rest, as its copy on another device would.
    """
    if not _is_ordinary(tensor):
        return mode.from_tensor(tensor)
    known: Any = mode.fake_tensor_converter.meta_converter
    storage, size = known.describer.get_storage_id(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
    with torch._C._DisableTorchDispatch():
        whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if whole.untyped_storage().nbytes() != size:
            if alone:
                return FakeTensor(mode, whole, tensor.device)
            if storage not in known.storage_memo:
                memory = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
                whole.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if storage in known.storage_memo:
        return mode.from_tensor(tensor)
    fake = FakeTensor(mode, whole, tensor.device)
    known.storage_memo[storage] = fake.untyped_storage()
    return fake


def fake_met(tensor: torch.Tensor, mode: FakeTensorMode, alone: bool) -> torch.Tensor:
    """The fake that operators are given for a real tensor while one lives; ``alone`` is as in ``fake_of``."""
    if _is_ordinary(tensor) and tensor.nbytes != tensor.untyped_storage().nbytes():
        fake: Any = fake_of(tensor, mode, alone)
        mode.fake_tensor_converter.set_tensor_memo(tensor, fake)
    return mode.from_tensor(tensor)


def fake_number(number: float, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    """What ``torch.tensor(number)`` is under a mode, a fake on the CPU that knows its value: in a fifth of the time."""
    with torch._C._DisableTorchDispatch():
        value = torch.tensor(number, dtype=dtype, device="cpu")
        fake = FakeTensor(mode, torch.empty_strided((), (), dtype=dtype, device="meta"), value.device, constant=value)
    mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    mode.fake_tensor_converter.set_tensor_memo(value, fake)  # written in place, it is still this one
    return fake


def met_by(mode: FakeTensorMode) -> list[torch.Tensor]:
    """The real tensors that operators were given under a mode."""
    return [*mode.fake_tensor_converter.meta_converter.describer.lookup_tensor]


def without_fake_gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some real tensors that have a fake gradient, which is taken from them."""
    found = [tensor for tensor in tensors if tensor.is_leaf and type(tensor.grad) is FakeTensor]
    for tensor in found:
        tensor.grad = None
    return found


def _is_ordinary(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_inference():
        return False
    lazy = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return not lazy and not tensor.requires_grad


def without_data(value: object) -> bool:
    """Whether it is a tensor that only stands for one."""
    return isinstance(value, FakeTensor | FunctionalTensor)


def asks_for_memory(error: Exception) -> bool:
    """Whether it was raised because a fake tensor, which has none, was asked for its memory."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ASKED_FOR_MEMORY)


def asks_for_numbers(error: Exception) -> bool:
    """Whether it was raised because fake numbers in a list or tuple, which have no values, were made an index."""
    return isinstance(error, RuntimeError) and _ASKED_FOR_NUMBERS in str(error)


def is_bare(error: Exception) -> bool:
    """Whether it was raised because PyTorch left a fake tensor on the meta device, as in backward of ``jvp``."""
    text = str(error)
    return "Expected all tensors to be on the same device" in text and re.search(r"\bmeta\b", text) is not None


def has_no_storage(error: Exception) -> bool:
    """Whether it was raised because a tensor without data is sparse, or nested, and is no tensor of one storage."""
    return any(words in str(error) for words in _NO_STORAGE)


def is_of_a_class(error: Exception) -> str:
    """The class of its own that a tensor without data was to be of, if that is why it was raised, else ""."""
    found = re.search(r"Creating a new Tensor subclass (\w+) but", str(error))
    return found[1] if found else ""


def lacks_fake_rule(error: Exception) -> str:
    """The name of the operator that has no rule for fake tensors, if that is why it was raised, else ""."""
    if isinstance(error, UnsupportedOperatorException):
        return schema_name(error.func)
    found = re.search(r"\w+::\w+", str(error))
    return found[0] if found and any(words in str(error) for words in _NO_RULE) else ""


def higher_order(error: Exception) -> str:
    """The name of the higher-order operator that a mode of ours was given, if that is why it was raised, else "".

    ``torch.cond`` traces its branches before, which without Dynamo takes no parameters.
    """
    found = re.search(r"There was no rule registered for (?:HigherOrderOperator|HOP) (\w+)", str(error))
    if found is None and isinstance(error, AssertionError) and _NOT_LIFTED in str(error):
        files = "".join(frame.filename for frame in traceback.extract_tb(error.__traceback__))
        found = re.search(r"_higher_order_ops.(cond)\.py", files)
    return found[1] if found else ""


_NO_STORAGE = ("Cannot access storage of Sparse", "shape_env must not be None", "NestedTensorImpl doesn't support")
_NO_RULE = ("no fake impl", "no Meta kernel", "not supported on the Meta", "Meta kernel registered")
_NOT_LIFTED = "Please convert all Tensors to FakeTensors first"
_ASKED_FOR_NUMBERS = "but its data is not allocated yet"
_ASKED_FOR_MEMORY = ("Cannot access data pointer of Tensor", ".numpy() is not supported for tensor subclasses")


@contextlib.contextmanager
def known_as_real(knows: Callable[[object], bool]) -> Iterator[None]:
    """Let code outside PyTorch take a fake tensor for a real one if ``knows`` says so.

    Code that would read a tensor's values asks first ``isinstance(x, torch._subclasses.FakeTensor)`` (transformers
    does), and does without if it is. The name is taken out of that package meanwhile and given on request, so that
    PyTorch's own modules get the class itself, also those that are imported meanwhile.
    """

    package = vars(torch._subclasses)
    with _ASKING:
        if not _KNOWING:
            package.pop("FakeTensor")
            package["__getattr__"] = _fake_tensor_class
        _KNOWING.append(knows)
    try:
        yield
    finally:
        with _ASKING:
            _KNOWING.remove(knows)
            if not _KNOWING:
                package["FakeTensor"] = FakeTensor
                del package["__getattr__"]


_ASKING = threading.Lock()
_KNOWING: list[Callable[[object], bool]] = []


class _Answer(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, FakeTensor) and not any(knows(value) for knows in _KNOWING)


_SEEMING = _Answer("FakeTensor", (), {})


def _fake_tensor_class(name: str) -> Any:
    if name != "FakeTensor":
        raise AttributeError(f"module {torch._subclasses.__name__!r} has no attribute {name!r}")
    asker = str(sys._getframe(1).f_globals.get("__name__"))
    return FakeTensor if asker.partition(".")[0] == "torch" else _SEEMING


@contextlib.contextmanager
def in_place_of_modes() -> Iterator[None]:
    """Operators run on real tensors, and no mode sees them."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


@process_wide
@contextlib.contextmanager
def real_rules_on_fake_tensors() -> Iterator[None]:
    """Let fake tensors take what real ones take, where PyTorch's rules for them are narrower.

    Grouped matrix products: the rule for their shapes takes bfloat16 alone, though the kernels take float32, too.
    ``module.to(...)`` in forward: parameters are swapped with their converted twins, which fails for those that weak
    references point to, as they do to fake ones; where nothing is to convert nothing is swapped. Waiting for a
    collective: the rule gives a new tensor, though what comes is the tensor that was waited for. A view that cannot be:
    the rule raises a ValueError, where forward may catch the RuntimeError of real tensors.
    """
    operator = torch.ops.aten._grouped_mm.default
    swap: Any = torch.utils.swap_tensors

    def shaped(mode: FakeTensorMode, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        given = named_arguments(func, args, kwargs)
        with mode:
            return _grouped_mm_output(given["self"], given["mat2"], given["offs"], given["out_dtype"])

    def swapped(old: torch.Tensor, new: torch.Tensor) -> None:
        fake = isinstance(old, FakeTensor) and isinstance(new, FakeTensor)
        if not fake or old.dtype != new.dtype or old.untyped_storage() is not new.untyped_storage():
            swap(old, new)

    view = _FAKE_RULES[torch.ops.aten.view.default]

    def viewed(*args: Any) -> Any:
        try:
            return view(*args)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    rules: dict[Any, Any] = {operator: shaped, torch.ops.aten.view.default: viewed}
    if hasattr(torch.ops._c10d_functional, "wait_tensor"):  # where PyTorch is built with torch.distributed
        rules[torch.ops._c10d_functional.wait_tensor.default] = lambda mode, func, tensor: tensor
    with (
        mock.patch.dict(_FAKE_RULES, rules),
        mock.patch.object(torch.utils, "swap_tensors", swapped),
    ):
        yield
