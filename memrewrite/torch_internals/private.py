"""The private PyTorch API memrewrite cannot do without, in one place.

Each name is checked on every supported version by ``tests/torch_internals/test_private.py``.
"""

import contextlib
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.optim.optimizer as optimizer_module
import torch.utils.checkpoint as checkpoint_module

from memrewrite.torch_internals.versions import private_imports, require, warn_if_untested

with private_imports():
    # The shape of a grouped matrix product, and the rules that fake tensors follow before all others.
    from torch._meta_registrations import _create_grouped_mm_output_tensor as _grouped_mm_output

    # Fake tensors and dispatch modes have no public spelling, though torch.distributed, torch.export and
    # PyTorch's own memory tools are built on them: they are how a step is observed without memory.
    from torch._ops import OpOverload
    from torch._subclasses.fake_impls import op_implementations_dict as _FAKE_RULES  # noqa: N812
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors

    # A registration that lasts as long as a context.
    from torch.library import _scoped_library

    # The types and devices that optimizers run their foreach kernels on when nothing else is asked for.
    from torch.optim.optimizer import _foreach_supported_types as _foreach_types
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as _foreach_devices
    from torch.utils._python_dispatch import TorchDispatchMode

    # The structure of nested inputs and outputs; torch.export speaks of them in these specs.
    from torch.utils._pytree import (
        TreeSpec,
        tree_flatten,
        tree_iter,
        tree_leaves,
        tree_map,
        tree_unflatten,
        treespec_dumps,
    )
    from torch.utils._sympy.printers import PythonPrinter

require(
    "_C._autograd._get_sequence_nr",
    "_C._AutoDispatchBelowAutograd",
    "_C._DisableTorchDispatch",
    "_C._ExcludeDispatchKeyGuard",
    "_C._current_autograd_node",
    "_C._dispatch_get_registrations_for_dispatch_key",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dispatch_keyset_full_after",
    "_C._set_grad_enabled",
    "_subclasses.FakeTensor",
    "Tensor._is_view",
    "library.get_kernel",
    "nn.modules.module._has_any_global_hook",
    "ops.aten._grouped_mm.default._schema",
    "utils.checkpoint._checkpoint_without_reentrant_generator",
    "utils.checkpoint.CheckpointFunction",
)
warn_if_untested(torch.__version__)

# What fake tensors raise where a result depends on data, or an operator knows no shapes.
FAKE_TENSOR_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

# Where the functions live that Dynamo's graphs call by no public name.
C_FUNCTIONS: dict[str, Any] = {
    "torch._C": torch._C,
    **{f"torch._C.{name}": getattr(torch._C, name) for name in ("_nn", "_fft", "_linalg", "_special")},
}

_CYCLES_PER_MS = 2_000_000  # of a clock of 2 GHz, which no device exceeds by much

__all__ = [
    "C_FUNCTIONS",
    "FAKE_TENSOR_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "Kernel",
    "OpOverload",
    "Scaler",
    "TorchDispatchMode",
    "TreeSpec",
    "autocast_operators",
    "backward_number",
    "below_autograd",
    "beyond_autocast",
    "checkpoint_calls",
    "clear_cublas_workspaces",
    "foreach_on_fake_tensors",
    "gives_gradient_of_leaf",
    "has_global_module_hooks",
    "in_place_of_modes",
    "is_mutable",
    "is_view",
    "keep_device_busy",
    "known_as_real",
    "named_arguments",
    "next_backward_number",
    "real_rules_on_fake_tensors",
    "real_tensors",
    "returns_view",
    "set_grad_enabled",
    "size_conditions",
    "tracing_untold",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "treespec_dumps",
    "without_autocast",
]


# How a graph by Dynamo spells the borders of no_grad and enable_grad; the public name makes a context manager.
set_grad_enabled = torch._C._set_grad_enabled


@contextlib.contextmanager
def foreach_on_fake_tensors(as_cuda: bool = False) -> Iterator[None]:
    """Let optimizers choose their foreach kernels for fake CUDA parameters, as they do for real ones.

    They decide by the exact type of a parameter, which for a fake one is FakeTensor. Foreach steps hold a
    temporary for every parameter at once, so the choice can decide the peak. ``as_cuda`` lets them choose so for
    fake parameters on the CPU, too.
    """
    devices = _foreach_devices()
    allowed = [*devices, "cpu"] if as_cuda else devices
    chosen = mock.patch.object(
        optimizer_module, "_get_foreach_kernels_supported_devices", autospec=True, return_value=allowed
    )
    _foreach_types.append(FakeTensor)
    try:
        with chosen:
            yield
    finally:
        _foreach_types.remove(FakeTensor)


@contextlib.contextmanager
def tracing_untold() -> Iterator[list[str]]:
    """Deny to everybody but PyTorch itself that a graph is being made; gives the names of the modules that asked.

    Code that asks does something else then (transformers makes the masks that it leaves to kernels otherwise), which
    is not what the model does whenever it is called. Dynamo never calls the two questions: it takes them for constants.
    """
    asked: list[str] = []
    with contextlib.ExitStack() as stack:
        for question in (torch.compiler.is_compiling, torch.compiler.is_exporting):
            stack.enter_context(_denied(question, asked))
        yield asked


@contextlib.contextmanager
def _denied(question: Any, asked: list[str]) -> Iterator[None]:
    # The function stays the object it is, because Dynamo knows it by that and others import it by name: it gets other
    # code, and what that needs as the default of an argument.
    code, defaults = question.__code__, question.__defaults__
    truth = types.FunctionType(code, question.__globals__, question.__name__, defaults)

    def answer() -> bool:
        name = str(sys._getframe(2).f_globals.get("__name__"))
        if name.partition(".")[0] == "torch":
            return bool(truth())
        asked.append(name)
        return False

    question.__code__, question.__defaults__ = _ask.__code__, (answer,)
    try:
        yield
    finally:
        question.__code__, question.__defaults__ = code, defaults


def _ask(answer: Callable[[], bool]) -> bool:
    return answer()


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


@contextlib.contextmanager
def real_rules_on_fake_tensors() -> Iterator[None]:
    """Let fake tensors take what real ones take, where PyTorch's rules for them are narrower.

    Grouped matrix products: the rule for their shapes takes bfloat16 alone, though the kernels take float32, too.
    ``module.to(...)`` in forward: parameters are swapped with their converted twins, which fails for those that weak
    references point to, as they do to fake ones; where nothing is to convert nothing is swapped.
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

    with (
        mock.patch.dict(_FAKE_RULES, {operator: shaped}),
        mock.patch.object(torch.utils, "swap_tensors", swapped),
    ):
        yield


def next_backward_number() -> int:
    """The number autograd gives to what it is the next to note for backward in this thread; they rise in forward."""
    return int(torch._C._autograd._get_sequence_nr())


def backward_number() -> int | None:
    """The number of what autograd is running now; None outside backward and while it adds to ``.grad``."""
    node = torch._C._current_autograd_node()
    return None if node is None or node.name().endswith("AccumulateGrad") else int(node._sequence_nr())


def gives_gradient_of_leaf() -> bool:
    """Whether a formula of backward is running, without grad mode unlike what runs again, that gives it to a leaf."""
    node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    following = () if node is None else (function for function, _ in node.next_functions)
    return any(function is not None and function.name().endswith("AccumulateGrad") for function in following)


def has_global_module_hooks() -> bool:
    """Whether hooks for every module are registered; there are functions to register them but none that asks."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def size_conditions(size: torch.SymInt) -> list[str]:
    """What tracing assumed about sizes beside their being at least 2, as Python expressions over their symbols.

    ``torch.export`` checks them in a module of its own; a graph written as source needs them as text.
    """
    environment = size.node.shape_env
    printer = PythonPrinter()
    guards = [environment.replace(guard.expr) for guard in environment.guards]
    return [printer.doprint(guard) for guard in dict.fromkeys(guards) if guard != True]  # noqa: E712  (a sympy value)


class Scaler(torch.amp.GradScaler):
    """A ``GradScaler`` for observing a step: it always lets the optimizer take it, and shows what it holds.

    Public methods ask the device whether a gradient overflowed, which fake tensors cannot answer, and skip the step if
    one did, which would leave its memory unseen. It scales by 1 until one overflows, so that gradients are those of the
    step without it.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=1.0, growth_interval=2**31 - 1)

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The scale and the count of steps without overflow, once it has scaled a loss."""
        return [t for t in (self._scale, self._growth_tracker) if t is not None]


# An operator's schema has no public spelling; which argument is the dropout probability and whether an operator
# writes its arguments are read from it rather than kept in tables by hand.
def named_arguments(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator call by their schema names, defaults included."""
    formal = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(formal, args, strict=False)}
    return {argument.name: argument.default_value for argument in formal} | given | kwargs


def is_mutable(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator writes one of its arguments."""
    return bool(operator._schema.is_mutable)


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS handles hold in the caching allocator; the next product allocates them anew.

    Only where CUDA is: a CPU build of PyTorch lacks the function.
    """
    torch._C._cuda_clearCublasWorkspaces()


def keep_device_busy(ms: float) -> None:
    """Let the current CUDA device do nothing for at least ``ms`` milliseconds, while the CPU goes on.

    PyTorch has this for its own tests; whatever else takes as long takes memory, too, or has its own price.
    """
    torch.cuda._sleep(int(ms * _CYCLES_PER_MS))


def returns_view(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator returns a view of an argument instead of a new tensor or the argument it wrote."""
    aliases = [result.alias_info for result in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd sees the tensor as a view, which operators such as ``linear`` return without saying so."""
    return tensor._is_view()


@contextlib.contextmanager
def checkpoint_calls() -> Iterator[list[str]]:
    """The calls of ``torch.utils.checkpoint`` made meanwhile, however it was imported.

    The two functions behind the public one are looked up when it runs; nothing public tells that it ran.
    """
    calls: list[str] = []

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    generators = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    name = next(name for name in generators if hasattr(checkpoint_module, name))  # the first since PyTorch 2.15
    reentrant = checkpoint_module.CheckpointFunction
    with (
        mock.patch.object(checkpoint_module, name, counted(getattr(checkpoint_module, name))),
        mock.patch.object(reentrant, "apply", counted(reentrant.apply)),
    ):
        yield calls


Kernel = Callable[[OpOverload, Any, tuple[Any, ...], dict[str, Any]], Any]  # operator, keys of the call, its arguments


@contextlib.contextmanager
def kernels_in_this_thread(kernels: Mapping[tuple[str, str], Kernel]) -> Iterator[None]:
    """Run ``kernels``, by name of an ATen operator and dispatch key, in place of what is registered there.

    Operators that C++ calls inside others are seen by no mode and no patch, only by the dispatcher. Registrations
    hold for all threads, so that others are led to what was there before; names that PyTorch lacks are left out.
    """
    here = threading.get_ident()
    with _scoped_library("aten", "IMPL") as library:
        for (name, key), kernel in kernels.items():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if isinstance(operator, OpOverload):
                instead = _only_in(here, operator, key, kernel)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the dispatcher warns of kernels that are overridden
                    library.impl(name, instead, key, with_keyset=True)
        yield


def _only_in(thread: int, operator: OpOverload, key: str, kernel: Kernel) -> Callable[..., Any]:
    cast = key.startswith("Autocast") and not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    before = None if cast else torch.library.get_kernel(operator, key)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return kernel(operator, keys, args, kwargs)
        if before is None:
            return beyond_autocast(operator, keys, args, kwargs)
        return before.call_boxed(keys, *args, **kwargs)

    return run


def beyond_autocast(operator: OpOverload, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Go on with a call that autocast of the CPU was asked about as if it had nothing to say; it stays on inside."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
    return operator.redispatch(keys & after, *args, **kwargs)


# What is called inside goes to the kernels below autograd, as an operator's own derivative formula calls them.
below_autograd = torch._C._AutoDispatchBelowAutograd


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast of the CPU is off, as it is inside its own kernels; ``torch.autocast`` is slower, at every operator."""
    guard: contextlib.AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    )
    return guard


def autocast_operators(device: str) -> frozenset[str]:
    """The names of the ATen operators that autocast of ``device`` has a rule for, in builds without it, too."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))
