"""The drop-in module: a subclass made on the fly whose forward is generated code. Torch only; part of every artifact.

``fully_shard`` and ``torch.nn.utils.parametrize`` swap classes the same way: the object stays an instance of the
user's class, with its attributes, methods, hooks and state-dict keys.
"""

import copy
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten, treespec_loads

from memrewrite.runtime.copies import Reduce, copied_by, is_of_parametrized
from memrewrite.runtime.differences import Owners, alike, exported, owners_of, parted, surrounded
from memrewrite.runtime.guards import Guards, Noted, Reads
from memrewrite.runtime.matching import match, numbers_of, sizes_in, values_of
from memrewrite.runtime.operations import AROUND_NODES, IN_GRAPHS
from memrewrite.runtime.parameters import Parameters
from memrewrite.runtime.plain_values import as_bytes
from memrewrite.runtime.promise import Call, Promise
from memrewrite.runtime.results import result_of
from memrewrite.runtime.segment import OWN
from memrewrite.runtime.texts import run_text

_PROGRAMS: dict[str, "Program"] = {}
Returns = Literal["all", "lazy", "loss"]
Forward = Callable[..., Any]


@dataclass
class Program:
    """The generated code of one model and the calls it is right for.

    ``names`` are the parameters of forward the example call filled; ``tree`` is the structure of their values;
    ``leaves`` has one entry per leaf: ``(dtype, device type, sizes)`` of a tensor, sizes being ints or, where they may
    vary, names, ``("number", type, name)`` of a number that may vary, or ``("constant", value)``, which has the name of
    its class, too, if that is an enum or the like.
    ``training`` maps submodule paths to the training flag they were captured with, ``differentiable`` says whether
    calls may record for backward, ``dtype`` is that of the first parameter;
    ``autocast`` is the type it has to cast to, None where there may be none, "any" where that does not matter. ``fits``
    says of named sizes whether forward takes the path that was captured, ``reads`` which attributes it read, ``look``
    gives what code that is traced compares of them, and ``same`` says whether that is still so: step by step, as what
    has changed may lack what comes after. ``run`` computes ``forward`` from the module and the tensor leaves;
    ``planned`` are the named sizes it was planned for, under a ``budget`` in bytes if one was given, ``strict`` where
    no other call may run. ``shared`` are the pairs of leaves that have to be one tensor, and no
    others, None where that does not matter.
    ``ranges`` are those asked for of named sizes: what that size is, in words, and from where to where it varies.
    ``gradients`` are those of ``gradients_now`` that a call must have, ``layouts`` those of ``layouts_now``, None where
    that does not matter. ``returns`` is "loss" where ``run`` gives None in the place of everything else, "lazy" where
    it gives outputs that are made when they are read. ``divided`` is the name of a parameter of which this process has
    to have a part alone, "" for none; ``tied`` are names that have to be those of one tensor. ``types``
    says that inputs have to be of their types also where autocast casts them; ``sets`` gives for named sizes and
    numbers what attributes are set to: the path of a module, a name, a value; ``holds`` are those that get tensors,
    which ``run`` gives beside the result. ``source`` is the text this came from.
    """

    names: tuple[str, ...]
    tree: TreeSpec
    leaves: tuple[Any, ...]
    training: dict[str, bool]
    dtype: torch.dtype | None
    run: Callable[..., Any]
    differentiable: bool = False
    fits: Callable[..., bool] = lambda **sizes: True
    autocast: torch.dtype | Literal["any"] | None = "any"
    reads: Reads = ()
    look: Callable[[Any], Any] = lambda self: ()
    same: Callable[[Any, Any], bool] = lambda self, then: True
    planned: Mapping[str, int] = field(default_factory=dict)
    budget: int | None = None
    strict: bool = False
    shared: tuple[tuple[int, int], ...] | None = None
    ranges: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    gradients: tuple[bool, ...] | None = None
    layouts: tuple[tuple[int, ...], ...] | None = None
    returns: Returns = "all"
    divided: str = ""
    tied: tuple[tuple[str, ...], ...] = ()
    types: bool = False
    sets: Callable[..., tuple[tuple[str, str, Any], ...]] | None = None
    holds: tuple[tuple[str, str], ...] = ()
    source: str = ""


def program_from(source: str) -> Program:
    """Compile generated source text; the text shows in tracebacks and to the debugger."""
    if source not in _PROGRAMS:
        trees = {"tree_structure": tree_structure, "tree_unflatten": tree_unflatten, "treespec_loads": treespec_loads}
        namespace: dict[str, Any] = {"Program": Program, **trees, **AROUND_NODES, **IN_GRAPHS}
        run_text(source, namespace)
        _PROGRAMS[source] = namespace["PROGRAM"]
        _PROGRAMS[source].source = source
    return _PROGRAMS[source]


class Own:
    """What one drop-in has to itself, outside of every listing of its parts: its class, made for it alone, keeps it.

    ``constants`` are tensors that the program holds, by name; ``owners`` are those of ``owners_of``; ``broken`` is what
    had changed when this was copied; ``replaced`` is the forward that was put on the original instead of its class's,
    ``parameters`` are those of either. ``report`` is that of ``optimize``, ``shown`` where the class has an attribute
    of that name; ``looked`` is what code that is traced finds as long as nothing has changed; ``promise`` is what is
    said of calls, ``others`` of those of objects that its class made. ``of`` refers to the drop-in, whose end lets go
    of the rest.
    """

    def __init__(self, base: type[nn.Module], program: Program, replaced: Forward | None) -> None:
        self.replaced, self.parameters = replaced, Parameters(replaced or base.forward)
        self.promise = Promise(base.__name__, program.budget, program.strict, program.planned)
        self.others = Promise(base.__name__, None, program.strict, {})
        self.kind: type = object
        self.of: Callable[[], nn.Module | None] = lambda: None
        self.guards: Guards | None = None
        self.constants: dict[str, Tensor] = {}
        self.owners: Owners = {}
        self.report: Any = None
        self.shown, self.broken = False, ""
        self.looked: Any = None

    def carry(self, report: Any, shown: bool, told: bool = False) -> None:
        """Keep the report, as an attribute too if it is to be ``shown``; ``told`` is that of the promise."""
        self.report, self.shown, self.promise.told = report, shown, told or self.promise.told
        if shown:
            setattr(self.kind, "report", report)  # noqa: B010  (a class made at run time declares none)

    def follow(self, tensors: list[Tensor]) -> None:
        """Let constants lie where the inputs do, if that is another device of their type now."""
        if self.constants and not torch.compiler.is_compiling():
            device = next((tensor.device for tensor in tensors), None)
            for name, tensor in self.constants.items():
                if device is not None and tensor.device != device and tensor.device.type == device.type:
                    self.constants[name] = tensor.to(device)
                    setattr(self.kind, name, self.constants[name])

    def tell_of_gradients(self, name: str) -> None:
        """Warn, once, that segments are not run as such because a parameter needs a gradient, or none, unlike then."""
        self.promise.tell_of_gradients(name, 9)

    def check_call(self, program: Program, tensors: list[Tensor], call: Call) -> None:
        """Let the promise look at a call that records for backward, at its sizes also if it was planned not to."""
        if torch.is_grad_enabled():
            self.promise.check_frozen(7, call)
        if program.planned and (torch.is_grad_enabled() or not program.differentiable):
            self.promise.check(sizes_in(program, tensors), 6, call)

    def end(self, reference: object) -> None:
        """Let go of everything: classes stay until Python looks for cycles, and would keep the parameters so long."""
        if self.guards is not None:
            vars(self.guards).clear()  # its rows refer to itself
        self.guards, self.constants, self.owners, self.promise.foresee = None, {}, {}, None


def build(
    model: nn.Module, program: Program, constants: dict[str, Tensor], captured: list[Any] | None = None
) -> nn.Module:
    """A module that runs ``program`` and shares every Parameter, buffer and submodule with ``model``.

    ``captured`` are the plain values of ``Guards`` at capture, where ``model`` may have others by now.
    """
    state = {key: value for key, value in vars(model).items() if key != "_compiled_call_impl"}  # that one calls model
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        state[name] = vars(model)[name].copy()
    replaced = state.pop("forward").__func__ if "forward" in state else None
    result = _empty(type(model), program, replaced)
    vars(result).update(state)
    prepare(result, constants, None if captured is None else (as_bytes(captured), {}))
    return result


def rewrite(module: nn.Module, program: Program, constants: dict[str, Tensor]) -> None:
    """Let a module run ``program`` itself: others refer to this one object, as ``fully_shard`` refers to its units."""
    base = base_of(module) if "_memrewrite" in vars(type(module)) else type(module)
    replaced = vars(module).pop("forward").__func__ if "forward" in vars(module) else None
    module.__class__ = _subclass(base, program, replaced)
    prepare(module, constants)


def graft(model: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """A model that shares everything with ``model`` but has ``children`` at their paths ("" for the model itself)."""
    if "" in children:
        return children[""]
    kind = type(model)
    result = object.__new__(kind)
    vars(result).update(vars(model))
    vars(result)["_modules"] = vars(model)["_modules"].copy()
    for name in dict.fromkeys(path.partition(".")[0] for path in children):
        inner = {path.partition(".")[2]: child for path, child in children.items() if path.partition(".")[0] == name}
        result._modules[name] = graft(model.get_submodule(name), inner)
    return result


def programs(model: nn.Module) -> dict[str, Program]:
    """The programs a rewritten model runs, by the path of the submodule ("" for the model itself)."""
    kinds = {path: vars(type(module)) for path, module in model.named_modules()}
    return {path: kind["_memrewrite"] for path, kind in kinds.items() if "_memrewrite" in kind}


def own(module: nn.Module) -> Own | None:
    """What a drop-in has to itself; None for other modules, also those that a method of its class makes."""
    found: Own | None = getattr(type(module), OWN, None)
    return found if found is not None and found.of() is module else None


def empty_like(module: nn.Module) -> nn.Module:
    """A drop-in for the same program without attributes, which ``prepare`` makes whole once it has them.

    It promises nothing.
    """
    kept: Own = vars(type(module))[OWN]
    copied = _empty(base_of(module), programs(module)[""], kept.replaced)
    twin: Own = vars(type(copied))[OWN]
    twin.promise = Promise(kept.promise.name, None, False, {})
    return copied


def base_of(module: nn.Module) -> type[nn.Module]:
    """The user's class of a drop-in."""
    kinds = type(module).__mro__
    return next(after for kind, after in itertools.pairwise(kinds) if "_memrewrite" in vars(kind))


def fallen_back(model: nn.Module) -> list[str]:
    """The paths of rewritten parts of a model that have run their original forward, and said so."""
    parts = {path: own(model.get_submodule(path)) for path in programs(model)}
    return [path for path, kept in parts.items() if kept is not None and kept.promise.fallen_back]


def _load(base: type[nn.Module], source: str, replaced: Forward | None = None) -> nn.Module:
    """What pickle and deepcopy call: the optimisation travels as text, the class by reference, the state follows."""
    return _empty(base, program_from(source), replaced)


def _load_graphs(plain: nn.Module, source: str) -> nn.Module:
    """What pickle calls where the class is that of one ``fx.GraphModule``, which is given as it is without us."""
    made = _load(type(plain), source)
    vars(made).update(vars(plain))
    return made


def _empty(base: type[nn.Module], program: Program, replaced: Forward | None) -> nn.Module:
    return object.__new__(_subclass(base, program, replaced))


def prepare(module: nn.Module, constants: dict[str, Tensor], then: Noted | None = None) -> None:
    """Note what every call of a drop-in looks at; ``then`` is that of ``Guards``."""
    kind = type(module)
    kept: Own = vars(kind)[OWN]
    program: Program = vars(kind)["_memrewrite"]
    kept.of = weakref.ref(module, kept.end)
    kept.constants = constants
    for name, tensor in constants.items():
        setattr(kind, name, tensor)
    noted = module, base_of(module), program.reads, program.training, constants.values()
    weight = next(module.parameters(), None)
    gathered = None if weight is None or weight.dtype == program.dtype else program.dtype
    try:
        kept.guards = Guards(*noted, then, gathered)
    except ValueError:  # there are other attributes to compare
        kept.guards, kept.broken = Guards(*noted, None, gathered), "it has other attributes than at capture"
    kept.owners = owners_of(module, program.tied)
    kept.promise.note_frozen(module)
    if not kept.broken and kept.guards.hold() and not parted(kept.owners, program.tied):
        kept.looked = copy.deepcopy(program.look(module))


def _subclass(base: type[nn.Module], program: Program, replaced: Forward | None) -> type[nn.Module]:
    """``class Base(Base)`` with the program's forward; every other method is inherited.

    The original forward is that of ``base``, or the one that ``replaced`` it on the object.

    All its names are those of ``base``: libraries look classes up by ``__name__`` and by what ``str`` makes of them,
    such as transformers, which shifts smoothed labels only for the names of its causal language models, and which finds
    what a model records (``output_hidden_states=True``) by the text of its class.
    """
    kept = Own(base, program, replaced)

    @functools.wraps(replaced or base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors, reason = accept(program, self, args, kwargs)
        if tensors is not None and (program.differentiable or not _trains(self, tensors)):
            kept.follow(tensors)
            if kept.promise.budget is not None and not torch.compiler.is_compiling():
                kept.check_call(program, tensors, (self, args, kwargs))
            return result_of(program, self, tensors, numbers_of(self, program, args, kwargs))
        reason = reason if tensors is None else "it was captured in eval mode, for calls under torch.no_grad()"
        if reason:
            call = None if torch.compiler.is_compiling() or _changed(self) else (self, args, kwargs)
            promise = kept.promise if torch.compiler.is_compiling() or own(self) is kept else kept.others
            promise.fall_back(f"ran its original forward: {reason}.", 5, call)
        return (kept.replaced or base.forward)(self, *args, **kwargs)

    def reduced(self: nn.Module, attributes: Any) -> Any:
        guards = kept.guards if kept.of() is self else None
        broken = kept.broken or (_NOT_OURS if guards is None else guards.lost_in_copies())
        then = None if guards is None or broken else guards.noted
        carried = broken, then, kept.constants, kept.report, kept.shown, kept.promise.told
        return _load, (base, program.source, kept.replaced), (attributes, *carried)

    def reduce(self: nn.Module, protocol: Any = None) -> Any:
        return reduced(self, self.__getstate__())

    def restore(self: Any, state: Any) -> None:
        attributes, kept.broken, then, constants, *carried = state
        base.__setstate__(self, attributes)
        prepare(self, constants, then)
        kept.carry(*carried)

    forward.__signature__ = inspect.signature(replaced or base.forward)  # type: ignore[attr-defined]
    graphs = of_graphs(kept, base, reduced) if issubclass(base, GraphModule) else {}
    graphs |= {"__deepcopy__": copied_by(reduced)} if graphs or is_of_parametrized(base) else {}
    members = {"forward": forward, "__reduce_ex__": reduce, "__setstate__": restore, "_memrewrite": program, OWN: kept}
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    kept.kind = type(base.__name__, (base,), {**members, **graphs, **names})
    return kept.kind


_NOT_OURS = "this object was not made by memrewrite.optimize but by a method of its class"


def of_graphs(kept: Own, base: type[nn.Module], reduced: Reduce) -> dict[str, Any]:
    """How drop-ins of an ``fx.GraphModule`` are compiled again and pickled: both would make one of ``base`` alone."""
    kept.replaced = captured = kept.replaced or base.forward
    changed = False

    def recompile(self: nn.Module) -> Any:
        nonlocal changed
        kind = type(self)
        made: Any = type(base.__name__, (base,), {"__module__": base.__module__})
        self.__class__ = made
        try:
            return made.recompile(self)
        finally:
            self.__class__ = kind
            kept.replaced = made.forward
            if changed or not kept.broken:  # not what was wrong before, as with the graph that this is a copy of
                changed = not alike(made.forward, captured)
                kept.broken = "its graph was changed" * changed

    def pickled(self: nn.Module, protocol: Any = None) -> Any:
        _, (_, source, _), (_, *carried) = reduced(self, None)
        plain = object.__new__(base)  # whose class is found under no name: PyTorch makes it again of its code
        vars(plain).update(vars(self))
        return _load_graphs, (plain, source), ({}, *carried)

    return {"recompile": recompile, "__reduce_ex__": pickled}


def accept(
    program: Program, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor] | None, str]:
    """The tensor leaves of a call the program is right for; else None and why.

    There is no reason to tell where the mode was switched, and where the model is exported: nothing runs again there.
    """
    if module.training != program.training[""] or exported():
        return None, ""
    if reason := _changed(module):
        return None, reason
    values = values_of(module, program, args, kwargs)
    if values is None:
        return None, f"it was captured for a call with {', '.join(program.names)}"
    leaves, tree = tree_flatten(values)
    if tree != program.tree:
        return None, "the inputs are nested differently than at capture, or keys of a dictionary come in another order"
    return match(program, module, leaves)


def _trains(module: nn.Module, tensors: list[Tensor]) -> bool:
    """Whether this call records anything for backward."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in itertools.chain(tensors, module.parameters()))


def _changed(module: nn.Module) -> str:
    """What is no longer as it was at capture, around the call, too; "" if nothing is."""
    kind: Any = type(module)  # one that ``fully_shard`` made, maybe
    kept: Own = getattr(kind, OWN)
    guards: Any = kept.guards
    if torch.compiler.is_compiling():
        # Each value that is looked at becomes a guard of the compiled code, as it does where the model is compiled.
        same = kept.looked is not None and kind._memrewrite.same(module, kept.looked)
        return surrounded() if same and not guards.wrapped() else "what it was captured with has changed"
    if guards is None or kept.of() is not module:
        return _NOT_OURS
    changed = kept.broken or ("" if guards.hold() else guards.changed())
    return changed or parted(kept.owners, kind._memrewrite.tied) or surrounded()
