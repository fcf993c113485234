"""What a model asks and calls while it is traced, and what tracing assumed. Read in PyTorch 2.11 to 2.15.

Nothing public tells who asked whether a graph is being made, that a checkpoint ran, or what sizes were taken for.
"""

import contextlib
import functools
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoint_module
from torch import fx, nn

from memrewrite.records.lines import is_users
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.torch_internals.versions import private_imports, require, require_module

with private_imports():
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

require(
    "distributions.Distribution._validate_args",
    "fx.proxy.CapturedTraceback",
    "jit.ScriptFunction.__call__",
    "fx.experimental.proxy_tensor._extract_tensor_metadata",
    "utils.checkpoint._checkpoint_without_reentrant_generator",
    "utils.checkpoint.CheckpointFunction",
)
require_module("torch.utils._sympy.printers")  # which imports sympy, in twice the time that all of memrewrite takes


def notes_operators() -> bool:
    """Whether operators that run now become nodes of a graph, which those inside of another one do not."""
    return get_proxy_mode() is not None


@process_wide
@contextlib.contextmanager
def code_when_run() -> Iterator[None]:
    """Make code of what is traced meanwhile when that runs: export changes a graph thirty times and runs it never.

    It asks for that itself in some places; in others code is made at once of every graph.
    """
    with _use_lazy_graph_module(True), mock.patch.object(fx.GraphModule, "recompile", _recompile_when_run):
        yield


_recompile: Callable[[fx.GraphModule], Any] = fx.GraphModule.recompile


def _recompile_when_run(module: fx.GraphModule) -> Any:
    if isinstance(module, _LazyGraphModule):  # which asks for it now
        return _recompile(module)
    kind: Any = type(module)  # of this module alone
    kind.forward, kind.code = _WhenAsked("forward"), _WhenAsked("code")
    nesting = getattr(module.graph._codegen, "pytree_info", None)
    if nesting is not None:  # which recompiling notes besides
        module._in_spec, module._out_spec = nesting.in_spec, nesting.out_spec
    return None


class _WhenAsked:
    """What a graph module has once its code is made, which is then."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: fx.GraphModule | None, kind: Any = None) -> Any:
        if module is None:
            return self
        for name in ("forward", "code"):
            if isinstance(vars(kind).get(name), _WhenAsked):
                delattr(kind, name)
        _recompile(module)
        return getattr(module, self._name)


@process_wide
@contextlib.contextmanager
def scripts_in_python() -> Iterator[set[str]]:
    """Run the Python of a function meanwhile for what ``torch.jit.script`` made of it; gives the names of those so run.

    Dynamo does so, too. TorchScript runs a graph of its own once it knows its arguments, whose gradients no trace sees.
    """
    scripted: Any = torch.jit.ScriptFunction
    theirs, names = scripted.__call__, set[str]()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        written = getattr(function, "_torchdynamo_inline", None)
        if written is None:  # it was loaded from a file
            return theirs(function, *args, **kwargs)
        names.add(function.name)
        return written(*args, **kwargs)

    with mock.patch.object(scripted, "__call__", call):
        yield names


@process_wide
@contextlib.contextmanager
def notes_in_short() -> Iterator[None]:
    """Let nodes that are traced meanwhile note sooner where they come from, and not how their values lie in memory.

    That is in the values themselves. Each node has a stack of a hundred frames, of which one says where it comes from.
    """
    proxies: Any = torch.fx.experimental.proxy_tensor
    metadata = functools.partial(proxies._extract_tensor_metadata, include_contiguity=False)
    with (
        mock.patch.object(torch.fx.proxy, "CapturedTraceback", _Stacks()),
        mock.patch.object(proxies, "_extract_tensor_metadata", metadata),
    ):
        yield


class _Stacks:
    """Gives of the stack of the caller what is kept of it: the innermost line of the user's, and the forward it is in.

    PyTorch keeps what the outermost forward calls, and nothing where there is none.
    """

    def __init__(self) -> None:
        self._kept: dict[str, bool] = {}  # whether a file is the user's and has lines

    def extract(self) -> "_Stack":
        """The stack as it is now."""
        found: list[traceback.FrameSummary] = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            is_forward = code.co_name == "forward"
            if is_forward if found else self._is_kept(code.co_filename):
                found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
                if is_forward:
                    break
            frame = frame.f_back
        return _Stack(found)

    def _is_kept(self, file: str) -> bool:
        if file not in self._kept:
            self._kept[file] = is_users(file) and bool(linecache.getline(file, 1))
        return self._kept[file]


class _Stack:
    """Frames, the innermost first."""

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self._frames = frames

    def summary(self) -> traceback.StackSummary:
        """The frames as Python's own module has them, the outermost first."""
        return traceback.StackSummary(reversed(self._frames))


def module_of(root: nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """The module of a graph, of which code is made once it is asked for or runs: passes change graphs, and run none."""
    return _LazyGraphModule(root, graph, class_name=name)


@process_wide
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


@process_wide
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


@contextlib.contextmanager
def distributions_as_before() -> Iterator[None]:
    """Let distributions look at what they are given, or not, as before: Dynamo's first run ends that for all that is.

    It is said nowhere, and they give no error for NaN from then on.
    """
    before = torch.distributions.Distribution._validate_args
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


def varying_size(tree: Any) -> torch.SymInt | None:
    """The first size that varies in a tree, of those in it and of those of its tensors."""
    leaves = tree_leaves(tree)
    sizes = (size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]))
    return next((size for size in sizes if isinstance(size, torch.SymInt)), None)


def size_conditions(size: torch.SymInt) -> list[str]:
    """What tracing assumed about sizes beside their being at least 2, as Python expressions over their symbols.

    ``torch.export`` checks them in a module of its own; a graph written as source needs them as text.
    """
    return [text for text in dict.fromkeys(conditions_in_order(size)) if text != "True"]


def conditions_in_order(size: torch.SymInt) -> list[str]:
    """Such a text for each assumption, in the order that tracing made them; "True" for what always holds.

    So for those about strides, which are not asked where sizes are fixed, either.
    """
    environment = size.node.shape_env
    strides = {
        symbol
        for symbol, sources in environment.var_to_sources.items()
        if any(".stride()" in each.name for each in sources)
    }
    conditions = (environment.replace(guard.expr) for guard in environment.guards)
    return ["True" if strides & each.free_symbols else _printed(each) for each in conditions]


def size_text(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
    """What follows from sizes as a Python expression over their symbols."""
    return _printed(value.node.shape_env.replace(value.node.expr))


def follows_from_sizes(value: Any) -> bool:
    """Whether a value is a number, or a truth, that varies with them."""
    return type(value) in _FOLLOWING


def _printed(expression: Any) -> str:
    with private_imports():
        from torch.utils._sympy.printers import PythonPrinter

    text: str = PythonPrinter().doprint(expression)
    return text.replace("torch.sym_float(", "float(")  # sizes are numbers where it is looked at


def assumed_so_far(size: torch.SymInt) -> int:
    """How many of them there are."""
    return len(size.node.shape_env.guards)


def settled_on(size: torch.SymInt) -> set[int]:
    """The numbers that tracing has settled on for sizes that were open before."""
    return {int(number) for number in size.node.shape_env.replacements.values() if number.is_number}


APART = -1


def size_at(size: int | torch.SymInt, step: int) -> int:
    """What a size is where each symbol is what it was traced with, and ``step`` times a number more.

    Symbols that were traced with one number are one, as sizes that must agree do; others are told apart. At the step
    ``APART`` each is told apart from all.
    """
    return int(value_at(size, step))


def value_at(value: Any, step: int) -> Any:
    """What a value is there that follows from sizes; any other one is what it is."""
    kind = _FOLLOWING.get(type(value))
    if kind is None:
        return value
    traced = value.node.shape_env.var_to_val
    numbers = sorted(set(traced.values()))
    if step == APART:
        return kind(value.node.expr.subs({s: numbers[-1] + n for n, s in enumerate(traced, 1)}))
    return kind(value.node.expr.subs({s: number + step * (numbers.index(number) + 1) for s, number in traced.items()}))


_FOLLOWING: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
