"""Submodules that stay calls in a graph: the model makes them as it always did, hooks, branches and all.

What one gives is seen in two real forward passes, at the example's sizes and at others, so that the tracer need not run
it. Meanwhile a stand-in takes its place in the model:

    x = aten.linear.default(inputs, self.first.weight)
    relu = self.relu(x)                                   # which has a hook
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture.derived import LARGEST, derived
from memrewrite.capture.opaque import BEHIND, Returning, Way, traced_now
from memrewrite.capture.other_sizes import a_bit_less, a_quarter, alike, apart, far_apart, other_sizes
from memrewrite.records.errors import UnfitCallError
from memrewrite.records.ranges import Range
from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.fake.as_seen import like_seen, note_seen
from memrewrite.simulate.fake.stand_ins import numbers_of_rows, same_size, varied
from memrewrite.simulate.fake.trials import Made, made_again
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.number_inputs import of_sizes
from memrewrite.torch_internals.pytrees import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)
from memrewrite.torch_internals.spread import is_sparse_or_nested
from memrewrite.workload.hooks import without_hooks
from memrewrite.workload.step import Inputs

_CALLS = "memrewrite_calls"  # of the class of a stand-in


@dataclass(frozen=True)
class SeenCall:
    """One call of a submodule: what each tensor among its arguments was like, and what it gave, tensors in words.

    ``given`` has None for an argument that is no tensor. ``ways`` lead from what it gave to each tensor in it.
    """

    given: tuple[TensorLike | None, ...]
    leaves: tuple[Any, ...]
    tree: TreeSpec
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class KeptCalls:
    """The calls of one submodule, in order, each at the example's sizes and, where it was seen there, at others.

    ``otherwise`` are those at the same sizes for other values, where what they give has other sizes then.
    """

    path: str
    module: nn.Module
    calls: tuple[tuple[SeenCall, ...], ...]
    otherwise: tuple[tuple[SeenCall, ...], ...] = ()

    def of(self, args: Any, kwargs: Any) -> "_Kept":
        """The call with these arguments, of which sizes may vary; raises ``UnfitCallError`` for one not seen."""
        leaves = tree_leaves((args, kwargs))
        for seen in self.calls:
            if len(seen[0].given) == len(leaves) and all(map(_fits, leaves, seen[0].given)):
                return _Kept(self.path, args, kwargs, seen)
        raise UnfitCallError(f"{self.path} is called otherwise while it is traced than in the step.", self.path)


def _fits(leaf: Any, like: TensorLike | None) -> bool:
    """Whether an argument is, as it was traced, a tensor of these sizes, of which some may vary, or none."""
    if like is None or not isinstance(leaf, Tensor):
        return like is None and not isinstance(leaf, Tensor)
    return len(leaf.shape) == len(like.shape) and all(map(_is_at, leaf.shape, like.shape))


def _is_at(size: int | torch.SymInt, seen: int) -> bool:
    return isinstance(size, torch.SymInt) or size == seen


class _Kept(Returning):
    """A call of a submodule while a graph is traced."""

    def __init__(self, path: str, args: Any, kwargs: Any, seen: Sequence[SeenCall]) -> None:
        super().__init__(path, (args, kwargs))
        if not all(map(of_sizes, self.sizes)):  # nobody knows what it makes of other numbers
            raise UnfitCallError(f"{path} is given a number that varies.", path)
        self._path, self._seen, self._first = path, seen, seen[0]
        self.ways = list(seen[0].ways)

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        return [leaf for leaf in made_again(self._made(tensors), ()) if isinstance(leaf, Tensor)]

    def returned(self, tensors: Iterator[Tensor]) -> Any:
        leaves = [next(tensors) if isinstance(leaf, TensorLike) else leaf for leaf in self._first.leaves]
        return tree_unflatten(leaves, self._first.tree)

    def node(self, graph: fx.Graph, tensors: Sequence[Any], sizes: Sequence[Any]) -> fx.Node:
        args, kwargs = self.args(tensors, sizes)
        node = graph.create_node("call_module", self._path, args, kwargs)  # its module is not there yet
        note_seen(node, self._first.leaves, self._first.tree)
        return node

    def on_fakes(self, parameters: list[Tensor]) -> Any:
        """What it gives where no graph is traced."""
        return like_seen([*self.tensors, *parameters], self._first.leaves, self._first.tree)

    def _made(self, tensors: Sequence[Tensor]) -> list[Any]:
        if not any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
            return _words(self._first)
        try:
            return self._varied(tensors)
        except (AttributeError, LookupError, ValueError):
            said = f"What {self._path} gives for other sizes is like none of what it is given."
            raise UnfitCallError(said, self._path) from None

    def _varied(self, tensors: Sequence[Tensor]) -> list[Any]:
        if len(self._seen) == 1 or any(seen.tree != self._first.tree for seen in self._seen):
            raise ValueError("It was not seen at other sizes, or gives something else there.")
        sizes = self._by_what_they_were(tensors, tuple)
        vary = {were: those for were, those in sizes.items() if isinstance(those[0], torch.SymInt)}
        if any(len({*were}) == 1 for were in vary):
            raise ValueError("A size that may vary was the same in all passes.")
        varying = self._by_what_they_were(tensors, numbers_of_rows) | sizes

        def size(were: tuple[int, ...]) -> Any:
            if len({*were}) > 1 and were not in varying and (follows := derived(were, vary)):
                varying[were] = follows
            return same_size(were, varying)

        return [varied(each, size) for each in zip(*map(_words, self._seen), strict=True)]

    def _by_what_they_were(
        self, tensors: Sequence[Tensor], sizes: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> dict[tuple[int, ...], list[Any]]:
        """The ``sizes`` of what was given in all passes, by what they were in each: those that vary, or else one."""
        found: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        traced = iter(tensors)
        for likes in zip(*(seen.given for seen in self._seen), strict=True):
            tensor = next(traced) if likes[0] is not None else None
            if tensor is None or None in likes:  # sizes may decide whether it is given
                continue
            for size, *were in zip(sizes(tensor.shape), *(sizes(like.shape) for like in likes), strict=True):
                found[tuple(were)].append(size)
        open_ones = {were: [each for each in those if isinstance(each, torch.SymInt)] for were, those in found.items()}
        return {were: open_ones[were] or those[:1] for were, those in found.items()}


def _words(seen: SeenCall) -> list[Any]:
    """What it gave, for tensors how to make such."""
    return [Made(leaf) if isinstance(leaf, TensorLike) else leaf for leaf in seen.leaves]


def watch_calls(
    model: nn.Module,
    inputs: Inputs,
    paths: Sequence[str],
    run: Callable[[Inputs], None],
    ranges: Sequence[Range] = (),
) -> Mapping[str, KeptCalls]:
    """How the submodules at ``paths`` are called as ``run`` takes ``model`` forward on inputs, these and others.

    One that is not called has no calls. Raises ``UnfitCallError`` for one that gives what no graph can hold.
    """
    modules = {path: model.get_submodule(path) for path in paths}
    passes = [_calls(modules, lambda: run(inputs))]
    if others := _for_other_values(model, inputs, passes[0], lambda given: _calls(modules, lambda: run(given))):
        return {path: KeptCalls(path, modules[path], _once(passes[0][path]), _once(others[path])) for path in paths}

    def again(other: Callable[[int, int], int], alone: bool) -> bool:
        """Whether the same calls are made in one more pass, at other sizes."""
        # Whatever forward says of other sizes: then they do not vary.
        with suppress(Exception), drawing_others(model, inputs):
            passes.append(_calls(modules, partial(run, other_sizes(model, inputs, ranges, other, alone))))
            return True
        return False

    def calls(path: str) -> list[tuple[SeenCall, ...]]:
        number = len(passes[0][path])
        return [*zip(*(made[path] for made in passes if len(made[path]) == number), strict=True)]

    def are_clear(other: Callable[[int, int], int], alone: bool) -> bool:
        """Whether what each call is given and gives is in both passes of the sizes that vary."""
        further = other_sizes(model, inputs, ranges, other, alone)
        vary = {(a, b) for a, b in _pairs(inputs.tensors(), further.tensors(), tuple) if a != b}
        return all(_is_clear(seen, vary) for path in paths for seen in calls(path))

    # The batch may be in what does not vary, too, as in the state of a recurrent layer: then the ranges vary alone.
    tries = [(apart, False), (alike, False), *([(apart, True)] if ranges else [])]
    second = next((each for each in tries if again(*each)), None)
    if second is not None and not are_clear(*second):
        again(far_apart, second[1])
        again(a_quarter, second[1])
        for number in range(1, LARGEST):
            again(partial(a_bit_less, number), second[1])
    return {path: KeptCalls(path, module, tuple(calls(path))) for path, module in modules.items()}


def _for_other_values(
    model: nn.Module,
    inputs: Inputs,
    first: Mapping[str, list[SeenCall]],
    calls: Callable[[Inputs], dict[str, list[SeenCall]]],
) -> dict[str, list[SeenCall]]:
    """The calls at the same sizes for other values and random numbers, where they give other sizes than the first."""
    with suppress(Exception), drawing_others(model, inputs):  # whatever forward says of them
        found = calls(inputs.changed(other_values))
        if any([*map(_shapes, found[path])] != [*map(_shapes, first[path])] for path in found):
            return found
    return {}


def other_values(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes with other values that a model may take; the same where there are none."""
    if tensor.is_floating_point() or not tensor.dim():
        return -tensor if tensor.dim() else tensor
    if tensor.dim() == 1 and tensor.dtype != torch.bool:  # lengths stay lengths, of fewer
        return tensor.where(tensor < 2, tensor // 2)
    return tensor[:1] * (torch.arange(tensor.shape[-1], device=tensor.device) % 2 == 0).expand_as(tensor)


def _once(calls: Sequence[SeenCall]) -> tuple[tuple[SeenCall, ...], ...]:
    return tuple((seen,) for seen in calls)


@contextmanager
def drawing_others(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Meanwhile other random numbers are drawn, which may decide sizes, too."""
    tensors = [*model.parameters(), *inputs.tensors()]
    with preserved_rng(tensors):
        for device in {"cpu", *(str(each.device) for each in tensors if torch.cuda.is_initialized() and each.is_cuda)}:
            torch.rand((), device=device)
        yield


def _shapes(seen: SeenCall) -> list[Any]:
    """The sizes of what a call gave."""
    return [leaf.shape if isinstance(leaf, TensorLike) else leaf for leaf in seen.leaves]


def _is_clear(seen: Sequence[SeenCall], vary: set[tuple[int, int]]) -> bool:
    """Whether, where sizes ``vary``, a call is given all of them, and gives none but those and numbers of rows.

    One that is not given a size may be given what follows from it, which is seen in more passes.
    """
    if len(seen) == 1:
        return True
    first, second = seen
    known = _pairs(first.given, second.given, numbers_of_rows)
    return vary <= known and all(a == b for a, b in _pairs(first.leaves, second.leaves, tuple) - known)


def _pairs(
    first: Sequence[Any], second: Sequence[Any], sizes: Callable[[Sequence[int]], Sequence[int]]
) -> set[tuple[int, int]]:
    """The ``sizes`` of what are tensors in both passes, or words for such, as they were in each."""
    tensors = [(a.shape, b.shape) for a, b in zip(first, second, strict=False) if a is not None and b is not None]
    return {pair for a, b in tensors for pair in zip(sizes(a), sizes(b), strict=False)}


def _calls(modules: Mapping[str, nn.Module], run: Callable[[], None]) -> dict[str, list[SeenCall]]:
    found: dict[str, list[SeenCall]] = {path: [] for path in modules}
    given: list[tuple[TensorLike | None, ...]] = []  # of the calls that have begun

    with ExitStack() as stack:
        for path, module in modules.items():

            def begin(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                leaves = tree_leaves((args, kwargs))
                given.append(tuple(_like(path, leaf) if isinstance(leaf, Tensor) else None for leaf in leaves))

            def end(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                found[path].append(_seen(path, given.pop(), output))

            stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end).remove)
        run()
    return found


def _seen(path: str, given: tuple[TensorLike | None, ...], output: Any) -> SeenCall:
    leaves, tree = tree_flatten(output)
    if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in leaves):
        said = f"{path} gives something else than tensors, which a graph would keep as it was."
        raise UnfitCallError(said, path)
    try:
        keys = [keys for keys, leaf in tree_flatten_with_path(output)[0] if isinstance(leaf, Tensor)]
        ways = tuple(tuple(map(_step, each)) for each in keys)
    except (AttributeError, ValueError):
        raise UnfitCallError(f"{path} gives an object that no graph can take apart.", path) from None
    words = tuple(_like(path, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return SeenCall(given, words, tree, ways)


def _like(path: str, tensor: Tensor) -> TensorLike:
    if is_sparse_or_nested(tensor):
        raise UnfitCallError(f"{path} is given or gives a sparse or nested tensor, which no graph can tell of.", path)
    return TensorLike.of(tensor)


def _step(key: Any) -> tuple[str, Any]:
    """A step into what a submodule gave, by PyTorch's own description of it."""
    for kind, name in (("item", "idx"), ("item", "key"), ("attribute", "name")):
        if hasattr(key, name):
            return kind, getattr(key, name)
    raise AttributeError(f"{key}")


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a stand-in is called for."""
    kept: KeptCalls = getattr(type(self), _CALLS)
    call = kept.of(args, kwargs)
    tracing = traced_now()
    return call.on_fakes([*kept.module.parameters()]) if tracing is None else tracing.called(call)


def _assign(self: nn.Module, name: str, value: Any) -> None:
    """Refuse it: what the submodule assigns there itself is not seen, so neither is what this undoes."""
    kept: KeptCalls = getattr(type(self), _CALLS)
    if name != "training":
        said = f"What has {kept.path} inside assigns to its {name} in forward, which no graph can hold."
        raise UnfitCallError(said, kept.path)
    super(type(self), self).__setattr__(name, value)


@contextmanager
def standing_in(model: nn.Module, kept: Mapping[str, KeptCalls]) -> Iterator[None]:
    """Meanwhile stand-ins take the places of these submodules: with their attributes, without children and hooks."""
    stand_ins = {id(calls.module): _stand_in(calls) for calls in kept.values()}
    parents = [module for module in model.modules() if id(module) not in stand_ins]
    places = [(p._modules, n, c) for p in parents for n, c in p._modules.items() if id(c) in stand_ins]
    try:
        for children, name, child in places:
            children[name] = stand_ins[id(child)]
        yield
    finally:
        for children, name, child in places:
            children[name] = child


def _stand_in(calls: KeptCalls) -> nn.Module:
    base = type(calls.module)
    result = without_hooks(calls.module)
    members = {_CALLS: calls, BEHIND: calls.module, "__module__": base.__module__}
    methods = {"__call__": _call, "__setattr__": _assign}
    # Of one base: beside a second one an object whose class begins with ABC would be laid out otherwise.
    result.__class__ = type(base.__name__, (base,), members | methods)
    vars(result)["_modules"] = {}
    return result
