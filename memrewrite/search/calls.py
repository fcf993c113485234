"""What each submodule is called with in a forward pass, and where it cannot be a region for that."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.capture.kept_calls import drawing_others, other_values
from memrewrite.capture.other_sizes import apart, batch_alone, longer_by_one, other_sizes
from memrewrite.records.lines import in_checkpoint
from memrewrite.records.mesh import Fsdp
from memrewrite.records.tensor_like import TensorLike
from memrewrite.runtime.differences import transformed
from memrewrite.runtime.guards import hooks_of
from memrewrite.search.forward_runs import forward_once, on_twin, with_or_without
from memrewrite.search.kept import fused
from memrewrite.simulate.fake.constant_values import asked_of
from memrewrite.torch_internals.custom_functions import custom_functions
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS, in_place_of_modes
from memrewrite.torch_internals.pytrees import tensors_in, tree_flatten, tree_leaves, tree_map, tree_unflatten
from memrewrite.torch_internals.spread import is_sparse_or_nested
from memrewrite.workload.ranges import per_token
from memrewrite.workload.step import Inputs, Step

_UNSEEN = "it is called with a sparse or a nested tensor"


@dataclass(frozen=True)
class Argument(TensorLike):
    """A tensor in words; if its values may be asked for (a mask's, say), with what its memory held, on the CPU.

    It ``may_train`` unless it is an input of the model that requires no gradient.
    """

    memory: Tensor | None = field(default=None, compare=False)
    may_train: bool = True

    def tensor(self, grad: bool) -> Tensor:
        """A tensor like it: of its values where these are known, else of zeros; with ``grad`` it requires one."""
        made = self.filled(0) if self.memory is None else self.over(self.memory.to(self.device, copy=True))
        return made.requires_grad_(grad and self.may_train and (made.is_floating_point() or made.is_complex()))


@dataclass(frozen=True)
class Call:
    """One call of a submodule: the how-manieth of all, and its arguments with tensors in words.

    ``unfit`` says why a submodule that is called so can be no region, "" if it can. ``elsewhere`` are the arguments of
    the same call in a step with other sizes, where it was seen.
    """

    number: int
    args: Any
    kwargs: Any
    unfit: str
    elsewhere: Inputs | None = None

    def inputs(self, grad: bool) -> Inputs:
        """Inputs like those of the call."""
        made: dict[int, Tensor] = {}  # by argument, which is one where it was one tensor

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, Argument):
                return leaf
            if id(leaf) not in made:
                made[id(leaf)] = leaf.tensor(grad)
            return made[id(leaf)]

        return Inputs(tree_map(make, self.args), tree_map(make, self.kwargs))


def record(model: nn.Module, inputs: Inputs, step: Step) -> dict[nn.Module, list[Call]]:
    """What every submodule is called with in one forward pass, and where inputs have other values, or other sizes.

    In a mesh, of whose processes each has sizes of its own, that is a pass on fake tensors, unless they do not tell.
    """
    if step.mesh is not None:
        with suppress(*FAKE_TENSOR_ERRORS):
            return _on_twin(model, inputs, step)
    found = with_or_without(lambda grad: _really(model, inputs, step, grad))
    if step.mesh is not None:
        return found

    def seen(others: Callable[[], Inputs]) -> bool:
        with suppress(Exception), drawing_others(model, inputs):  # whatever forward says of these: then nothing varies
            further = with_or_without(partial(_really, model, others(), step))
            found.update({module: _paired(calls, further[module]) for module, calls in found.items()})
            return True
        return False

    seen(partial(inputs.changed, other_values))
    sizes = partial(other_sizes, model, inputs, ())
    if not seen(partial(sizes, apart)):  # texts must not be cut, as where some of their tokens stand for images
        length = next((leaf.shape[1] for leaf in inputs.tensors() if per_token(leaf)), 0)
        seen(partial(sizes, batch_alone))
        seen(partial(sizes, partial(longer_by_one, length)))
    return found


def _paired(calls: list[Call], further: list[Call]) -> list[Call]:
    """The calls with what the same ones were given elsewhere, where these are of the same kind."""
    if [_kind(call) for call in calls] != [_kind(call) for call in further]:
        return calls
    pairs = zip(calls, further, strict=True)
    return [replace(call, elsewhere=_elsewhere(call, other)) for call, other in pairs]


def _elsewhere(call: Call, other: Call) -> Inputs:
    """What another call was given, in which sizes that are the call's are those that it was seen with before."""
    given = other.args, other.kwargs
    if call.elsewhere is None:
        return Inputs(*given)
    seen = iter(tree_leaves((call.elsewhere.args, call.elsewhere.kwargs)))
    leaves, tree = tree_flatten((call.args, call.kwargs))
    found = [_of_both(*each) for each in zip(leaves, seen, tree_leaves(given), strict=True)]
    return Inputs(*tree_unflatten(found, tree))


def _of_both(first: Any, seen: Any, other: Any) -> Any:
    if not isinstance(first, TensorLike):
        return other
    sizes = zip(first.shape, seen.shape, other.shape, strict=True)
    return replace(other, shape=tuple(before if now == size else now for size, before, now in sizes))


def _kind(call: Call) -> Any:
    """How arguments are nested, and which are tensors of how many dimensions."""
    leaves, tree = tree_flatten((call.args, call.kwargs))
    return tree, [len(leaf.shape) if isinstance(leaf, TensorLike) else None for leaf in leaves]


def _really(model: nn.Module, inputs: Inputs, step: Step, grad: bool) -> dict[nn.Module, list[Call]]:
    return _calls(model, inputs, step, lambda: forward_once(model, inputs, step, grad))


def _on_twin(model: nn.Module, inputs: Inputs, step: Step) -> dict[nn.Module, list[Call]]:
    with on_twin(model, inputs, step) as (twin, fakes, run):
        found = _calls(twin, fakes, step, lambda: run(fakes))
        return {module: found[twin.get_submodule(path)] for path, module in model.named_modules()}


def _calls(model: nn.Module, inputs: Inputs, step: Step, run: Callable[[], None]) -> dict[nn.Module, list[Call]]:
    """What its submodules are called with as ``run`` takes a model forward on inputs."""
    calls: dict[nn.Module, list[Call]] = defaultdict(list)
    numbers, sharded = iter(range(10**9)), isinstance(step.mesh, Fsdp)  # whose units hold what has hooks as calls
    memories: dict[tuple[torch.dtype, bytes], Tensor] = {}  # of what many are given, one
    own = {id(tensor) for tensor in inputs.tensors()}
    known = {id(module): len([*hooks_of(module)]) for module in model.modules()} if sharded else {}
    functions = {_code(methods.forward): kind.__name__ for kind, methods in custom_functions().items()}
    by_one_kernel = {model.get_submodule(path) for path in fused(model, step.amp)}

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors_in((args, kwargs))
        unseen = any(map(is_sparse_or_nested, given))
        unfit = _UNSEEN if unseen else _unfit_now(module, known, functions, by_one_kernel)
        words = {id(tensor): _in_words(tensor, memories, own) for tensor in given}
        args, kwargs = tree_map(lambda leaf: words.get(id(leaf), leaf), (args, kwargs))
        calls[module].append(Call(next(numbers), args, kwargs, unfit))

    with ExitStack() as stack:
        for _, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        run()
    return calls


def _in_words(
    tensor: Tensor, memories: dict[tuple[torch.dtype, bytes], Tensor], own: Collection[int]
) -> Argument | str:
    if is_sparse_or_nested(tensor):
        return _UNSEEN
    argument = replace(Argument.of(tensor), may_train=tensor.requires_grad or id(tensor) not in own)
    value = None if tensor.is_meta or 0 in tensor.shape else asked_of(tensor)
    if value is None:
        return argument
    with in_place_of_modes():
        if value.stride() == argument.stride:
            memory = value.as_strided((argument.extent,), (1,)).to("cpu", copy=True)
        else:  # as a value that is known beside a fake tensor may lie otherwise
            memory = torch.zeros(argument.extent, dtype=value.dtype)
            once = tuple(slice(1 if stride == 0 else None) for stride in argument.stride)  # of what is expanded
            memory.as_strided(argument.shape, argument.stride)[once].copy_(value[once])
        key = memory.dtype, memory.view(torch.uint8).numpy().tobytes()
    return replace(argument, memory=memories.setdefault(key, memory))


def _unfit_now(
    module: nn.Module,
    known: Mapping[int, int],
    functions: Mapping[CodeType | None, str],
    by_one_kernel: Collection[nn.Module],
) -> str:
    """Why a submodule can be no region when it is called now, while one hook of ours is on every module.

    Inside of it there may be so many others as are ``known``, by the ``id`` of their module. ``functions`` are the
    names of custom Functions by the code of their forward: autograd keeps nothing of what runs in one, and its backward
    may run it again, on arguments of its own (as that of reversible layers does). What PyTorch may run
    ``by_one_kernel`` would run by others in a region.
    """
    if within := transformed():
        return within
    if in_checkpoint():
        return "the model runs it under its own torch.utils.checkpoint"
    if function := _function_now(functions):
        return f"the model runs it in its own autograd.Function {function}"
    for path, inner in module.named_modules():
        if path and len([*hooks_of(inner)]) > 1 + known.get(id(inner), 0):
            return f"the model has a hook on its {path} when it runs, which a region would not call"
    if any(inner in by_one_kernel for inner in module.modules()):
        return "PyTorch may run attention in it by one kernel in eval mode"
    return ""


def _function_now(functions: Mapping[CodeType | None, str]) -> str:
    """The custom Function whose forward runs the code that asks, "" if none does."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in functions:
            return functions[frame.f_code]
        frame = frame.f_back
    return ""


def _code(function: Any) -> CodeType | None:
    """The code of a function, also of one that is wrapped; None where it is not written in Python."""
    return getattr(inspect.unwrap(function), "__code__", None)
