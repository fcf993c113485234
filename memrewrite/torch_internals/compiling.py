"""Inductor with a partitioner of ours, and errors that Dynamo lets through as they are. Read in PyTorch 2.11 to 2.14.

How ``torch.compile`` reads options and modes for Inductor is in a private class; an error of a back end is told in
another's words, but for one class of Dynamo's own; whose frame a graph is of, and the real tensors that it will be
given, stand in Dynamo's own records alone.
"""

import contextlib
import hashlib
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from memrewrite.runtime.tied_embedding import embedding_gradient
from memrewrite.torch_internals.fusions import Room, fused_within
from memrewrite.torch_internals.subclasses import subclasses
from memrewrite.torch_internals.versions import private_imports, require
from memrewrite.torch_internals.written_over import written_over

require("_TorchCompileInductorWrapper")
with private_imports():
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

# What Dynamo makes of torch.utils.checkpoint: operators on graphs, which no dispatch mode knows.
_CHECKPOINTS = {"tag_activation_checkpoint", "wrap_activation_checkpoint"}

_EMBEDDING = torch.ops.aten.embedding_dense_backward.default

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def inductor(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any],
    partitioner: "Partitioner | None",
    cached: bool,
    room: Room | None,
) -> Callable[..., Any]:
    """What Inductor makes of a graph with a mode and options of its own, and with a partitioner, else the stock one.

    Where it must not be ``cached`` the partitioner is asked even for a graph that was compiled before. With one the
    gradients of embeddings are left to ATen: Inductor's own are made in float32, of the size of the whole weight.
    Kernels are fused as long as there is ``room``, where any is told.

    Raises ``ValueError`` with Inductor's words for a mode or an option that it does not know.
    """
    try:
        compiler: Any = torch._TorchCompileInductorWrapper(mode, options, None)
    except (RuntimeError, KeyError) as error:
        raise ValueError(str(error)) from error
    if partitioner is None:
        return cast(Callable[..., Any], compiler(graph, inputs))
    compiler.config["custom_partitioner_fn"] = partitioner
    of_cache = contextlib.nullcontext() if cached else torch._functorch.config.patch(enable_autograd_cache=False)
    fused = contextlib.nullcontext() if room is None else fused_within(room)
    with of_cache, _embeddings_of_aten(compiler.config), written_over(), fused:
        return cast(Callable[..., Any], compiler(graph, inputs))


@contextlib.contextmanager
def _embeddings_of_aten(config: dict[str, Any]) -> Iterator[None]:
    """With another decomposition of their gradients, in Inductor's own table: with another table it caches nothing."""
    with private_imports():
        from torch._inductor import config as settings
        from torch._inductor.decomposition import select_decomp_table
    with settings.patch(config):
        table = select_decomp_table()
    usual = table[_EMBEDDING]

    def decomposed(of_rows: Tensor, indices: Tensor, count: int, padding_idx: int, by_frequency: bool) -> Tensor:
        if by_frequency:
            return cast(Tensor, usual(of_rows, indices, count, padding_idx, by_frequency))
        return embedding_gradient(of_rows, indices, count, padding_idx)

    with mock.patch.dict(table, {_EMBEDDING: decomposed}):
        yield


class Partitioner(CustomPartitionerFn):
    """A partition as Inductor takes it; ``identity`` is what tells its graphs from others in the cache.

    Inductor's caches pickle their settings for a key, so that only the identity is part of that.
    """

    def __init__(self, partition: Partition | None, identity: str) -> None:
        self._partition, self._identity = partition, identity

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """The forward and the backward graph."""
        assert self._partition is not None  # noqa: S101  (only a key's copy has none)
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """The identity."""
        return self._identity

    def __reduce__(self) -> tuple[type["Partitioner"], tuple[None, str]]:
        return Partitioner, (None, self._identity)


@cache
def digest(folder: Path, *others: Path) -> str:
    """A hash of the Python files in a folder, and of others: what is the same gives the same graphs."""
    hashed = hashlib.sha256()
    for file in sorted([*folder.glob("*.py"), *others]):
        hashed.update(file.name.encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()


def rival_of(options: Mapping[str, Any], keeps_less: bool) -> str | None:
    """The setting by which something else divides graphs, if any; ``keeps_less`` counts what the stock one has for it.

    Those of Inductor may stand in its ``options``, too.
    """
    with private_imports():
        from torch._functorch import config as functorch
        from torch._inductor import config
    given = {name.replace("-", "_"): value for name, value in options.items()}
    if given.get("custom_partitioner_fn", config.custom_partitioner_fn) is not None:
        return "torch._inductor.config.custom_partitioner_fn"
    if keeps_less and functorch.activation_memory_budget != 1:
        return "torch._functorch.config.activation_memory_budget"
    return None


def donates() -> bool:
    """Whether backward may write over what is kept for it, so that it runs once; Inductor's own keys do not tell."""
    return bool(torch._functorch.config.donated_buffer)


def let_through(error: Exception) -> Exception:
    """An error of the same class and words that Dynamo does not wrap, and of whose frames it shows none of its own.

    To be raised by who calls this.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind, frame = type(error), inspect.currentframe()

    class Through(kind, ShortenTraceback):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            ShortenTraceback.__init__(self, *error.args, first_useful_frame=None)
            self.__dict__.update(vars(error))
            self.first_useful_frame = None if frame is None else frame.f_back

        def __str__(self) -> str:
            return str(error)

        def __reduce__(self) -> Any:
            return error.__reduce__()

    Through.__name__, Through.__qualname__, Through.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Through()


def real_tensors_of(graph: fx.GraphModule) -> list[Tensor | None]:
    """What each input of a graph of Dynamo's really is: parameters, buffers; None for what is no tensor or is gone."""
    found: list[Tensor | None] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        value = None if argument is None else getattr(argument, "example", None)
        found.append(value if isinstance(value, Tensor) else None)
    return found


def copied(graph: fx.GraphModule, plain: bool) -> fx.GraphModule:
    """A copy of a graph of Dynamo's that holds nothing of its compilation; ``plain``: without checkpoints."""
    new = fx.Graph()
    there: dict[fx.Node, fx.Node] = {}
    parts = {n: copied(part, plain) for n, part in graph.named_children() if isinstance(part, fx.GraphModule)}
    for node in graph.graph.nodes:
        if plain and getattr(node.target, "_name", "") in _CHECKPOINTS:
            body, *args = node.args
            there[node] = new.call_module(body.target, tuple(map_arg(args, there.__getitem__)))
            continue
        there[node] = new.node_copy(node, there.__getitem__)
        there[node].meta = {}
    result = fx.GraphModule(graph, new)
    for name, part in parts.items():
        setattr(result, name, part)
    return result


def module_of_frame() -> nn.Module | None:
    """The module whose method the outermost frame is that Dynamo is in; None where it is of a function.

    Around what stands in PyTorch itself, such as the forward of a ``Sequential``, Dynamo puts a frame of its own.
    """
    code, there = code_of_frame(), getattr(_outermost(), "f_locals", {})
    if _is_around(code):
        found = getattr(there["fn"], "__self__", there["fn"])
    else:
        found = there.get("self", _first_given(code, there))
    return found if isinstance(found, nn.Module) else None


def _first_given(code: types.CodeType | None, there: Mapping[str, Any]) -> Any:
    """The first of a code's arguments, also where it is in ``*args``, if it is a method of that; else None."""
    if code is None or not code.co_varnames:
        return None
    names = code.co_varnames[code.co_kwonlyargcount :] if not code.co_argcount else code.co_varnames
    first = there.get(names[0])
    found = first[0] if isinstance(first, tuple) and first else first
    methods = (each for kind in type(found).__mro__ for each in vars(kind).values())
    return found if any(getattr(each, "__code__", None) is code for each in methods) else None


def name_of_frame() -> str:
    """What Dynamo compiles at present: the name of a function, or of the class of a module of PyTorch's."""
    code, module = code_of_frame(), module_of_frame()
    if code is None or (_is_around(code) and module is None):
        return "What was compiled"
    return type(module).__name__ if _is_around(code) else code.co_qualname


def _is_around(code: types.CodeType | None) -> bool:
    return code is not None and code.co_qualname.startswith("wrap_inline.") and "fn" in code.co_freevars


def model_of_frame() -> nn.Module | None:
    """The outermost module that is at work: where graphs break, or parts are compiled one by one, the code around them
    runs as it is, in methods of the modules that they are parts of.

    No other frame is asked for its variables: before Python 3.13 it would keep what they are now, such as the logits of
    a step, until it ends.
    """
    found, caller = module_of_frame(), inspect.currentframe()
    kinds = {(base.__module__, base.__qualname__) for kind in subclasses(nn.Module) for base in kind.__mro__}
    while caller is not None:
        kind = caller.f_code.co_qualname.rpartition(".")[0]
        is_method = (caller.f_globals.get("__name__"), kind) in kinds
        if is_method and isinstance(own := caller.f_locals.get("self"), nn.Module):
            found = own
        caller = caller.f_back
    return found


def code_of_frame() -> types.CodeType | None:
    """The code of the outermost frame that Dynamo is in; None outside of Dynamo."""
    found: types.CodeType | None = getattr(_outermost(), "f_code", None)
    return found


def at_limit_of(code: types.CodeType) -> int | None:
    """How often Dynamo compiles one code, where it does so now for the last time: other calls then run as they are."""
    limit: int = torch._dynamo.config.recompile_limit
    return limit if len(_debug_get_cache_entry_list(code)) + 1 >= limit else None


def forget_code(code: types.CodeType) -> None:
    """Let Dynamo translate a code anew when it is next called."""
    reset_code(code)


def backend_of_frame() -> Any:
    """The back end as ``torch.compile`` holds it that Dynamo compiles the present frame for; None outside of Dynamo."""
    translator = _translator()
    return None if translator is None else _innermost(translator.output.compiler_fn)


def _outermost() -> Any:
    """What Dynamo translates the outermost frame by that it is in; None outside of Dynamo."""
    translator = _translator()
    while getattr(translator, "parent", None) is not None:
        translator = translator.parent
    return translator


def _translator() -> Any:
    """What Dynamo translates the present frame by; None outside of Dynamo, of which some versions raise."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except (AttributeError, RuntimeError, AssertionError):
        return None


def backend_of(made: Any) -> Any:
    """The back end of what ``torch.compile`` returned, also as a method, or of a module that is compiled in place or
    has a forward that is; None for anything else."""
    if isinstance(made, nn.Module):
        context = vars(made).get("dynamo_ctx")
        if context is None:
            return backend_of(getattr(made, "_compiled_call_impl", None) or made.forward)
        return _innermost(getattr(context, "callback", None))
    made = getattr(made, "__func__", made)
    if not inspect.isfunction(made) or not hasattr(made, "_torchdynamo_orig_callable"):
        return None
    return _innermost(inspect.getclosurevars(made).nonlocals.get("callback"))


def _innermost(callback: Any) -> Any:
    """What a callback of Dynamo's calls in the end; that of DDP first divides a graph by the buckets of gradients."""
    of_ddp = getattr(callback, "__self__", None)
    for inner in (getattr(callback, "_torchdynamo_orig_backend", None), getattr(of_ddp, "backend_compile_fn", None)):
        if inner is not None:
            return _innermost(inner)
    return callback


def reference(made: Callable[..., Any]) -> Callable[[], object]:
    """A weak reference to what Dynamo keeps of what a back end returned: without marks that Dynamo is not to look in.

    A bound method, which would be gone at once, stands for its object.
    """
    while (inner := getattr(made, "_torchdynamo_orig_callable", None)) is not None:
        made = inner
    return weakref.ref(getattr(made, "__self__", made))


def cache_hits() -> int:
    """How many graphs AOTAutograd has found in its cache, so that nothing divided them."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"])


def noted(key: str) -> str | None:
    """What a process that wrote into Inductor's cache has noted; None where it did not."""
    try:
        return _note(key).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def note(key: str, text: str = "") -> None:
    """Note something in Inductor's cache, beside the graphs that it is about."""
    file = _note(key)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # of a cache that nobody may write to
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(file)  # whole, for processes that read it


def _note(key: str) -> Path:
    with private_imports():
        from torch._inductor.runtime.cache_dir_utils import cache_dir
    return Path(cache_dir(), "memrewrite", hashlib.sha256(key.encode()).hexdigest())


def saved_by(node: Any) -> list[Tensor]:
    """The tensors that a node of the autograd graph keeps for backward; none that it lets go of.

    What operators keep stands in attributes of no common name; of what compiled code keeps outside of autograd's sight,
    the version counters' exemption aside, nothing is known.
    """
    names = [name for name in dir(node) if name == "saved_tensors" or name.startswith("_saved_")]
    found: list[Tensor] = []
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed, or packed by hooks that want to be asked in backward alone
            continue
        found += [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)]
    return found
