"""Submodules that stay calls in a graph: the model makes them as it always did, hooks, branches and all.

What one gives is seen in two real forward passes, at the example's sizes and at others, so that the tracer need not run
it. Meanwhile a stand-in takes its place in the model:

    x = aten.linear.default(inputs, self.first.weight)
    relu = self.relu(x)                                   # which has a hook
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture.normal import batch_size
from memrewrite.capture.opaque import BEHIND, Traced, Way, traced_now
from memrewrite.records.errors import CaptureError
from memrewrite.records.ranges import Range
from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.fake.as_seen import like_seen, note_seen
from memrewrite.simulate.fake.stand_ins import numbers_of_rows, varied
from memrewrite.simulate.fake.trials import Made, made_again
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.pytrees import (
    TreeSpec,
    tensors_in,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from memrewrite.workload.hooks import without_hooks
from memrewrite.workload.ranges import brought_to, per_token, positions
from memrewrite.workload.step import Inputs

_CALLS = "memrewrite_calls"  # of the class of a stand-in


@dataclass(frozen=True)
class SeenCall:
    """One call of a submodule: what the tensors were like that it was given, and what it gave, tensors in words.

    ``ways`` lead from what it gave to each tensor in it.
    """

    given: tuple[TensorLike, ...]
    leaves: tuple[Any, ...]
    tree: TreeSpec
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class KeptCalls:
    """The calls of one submodule, in order, each at the example's sizes and at others (None where not seen there)."""

    path: str
    module: nn.Module
    calls: tuple[tuple[SeenCall, SeenCall | None], ...]

    def of(self, args: Any, kwargs: Any) -> "_Kept":
        """The call with these arguments, of which sizes may vary; raises ``CaptureError`` for one that was not seen."""
        tensors = tensors_in((args, kwargs))
        for first, second in self.calls:
            if len(first.given) == len(tensors) and all(map(_fits, tensors, first.given)):
                return _Kept(self.path, args, kwargs, first, second)
        raise CaptureError(f"{self.path} is called otherwise while it is traced than in the step.")


def _fits(tensor: Tensor, like: TensorLike) -> bool:
    """Whether a tensor whose sizes may vary is, as it was traced, of these sizes."""
    return len(tensor.shape) == len(like.shape) and all(map(_is_at, tensor.shape, like.shape))


def _is_at(size: int | torch.SymInt, seen: int) -> bool:
    return isinstance(size, torch.SymInt) or size == seen


class _Kept(Traced):
    """A call of a submodule while a graph is traced."""

    def __init__(self, path: str, args: Any, kwargs: Any, first: SeenCall, second: SeenCall | None) -> None:
        super().__init__(path, (args, kwargs))
        self._path, self._first, self._second = path, first, second
        self.ways = list(first.ways)

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
        first = [Made(leaf) if isinstance(leaf, TensorLike) else leaf for leaf in self._first.leaves]
        if not any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
            return first
        try:
            return self._varied(first, tensors)
        except (AttributeError, LookupError, ValueError):
            raise CaptureError(f"What {self._path} gives for other sizes is like none of what it is given.") from None

    def _varied(self, first: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
        if self._second is None or self._second.tree != self._first.tree:
            raise ValueError("It was not seen at other sizes, or gives something else there.")
        given = [*zip(tensors, self._first.given, self._second.given, strict=True)]
        sizes = _by_what_they_were((tensor.shape, first.shape, second.shape) for tensor, first, second in given)
        if any(a == b for a, b in sizes):
            raise ValueError("A size that may vary was the same in both passes.")
        rows = _by_what_they_were(
            (numbers_of_rows(tensor.shape), numbers_of_rows(first.shape), numbers_of_rows(second.shape))
            for tensor, first, second in given
        )
        varying = rows | sizes
        further = [Made(leaf) if isinstance(leaf, TensorLike) else leaf for leaf in self._second.leaves]
        pairs_of_results = zip(first, further, strict=True)
        return [varied(a, b, varying) if isinstance(a, Made) and a != b else a for a, b in pairs_of_results]


def _by_what_they_were(
    shapes: Iterable[tuple[Sequence[Any], Sequence[int], Sequence[int]]],
) -> dict[tuple[int, int], list[torch.SymInt]]:
    """The sizes that vary, by what they were in each of two passes."""
    found: dict[tuple[int, int], list[torch.SymInt]] = defaultdict(list)
    for traced, *seen in shapes:
        for size, first, second in zip(traced, *seen, strict=True):
            if isinstance(size, torch.SymInt):
                found[first, second].append(size)
    return found


def watch_calls(
    model: nn.Module,
    inputs: Inputs,
    paths: Sequence[str],
    run: Callable[[Inputs], None],
    ranges: Sequence[Range] = (),
) -> Mapping[str, KeptCalls]:
    """How the submodules at ``paths`` are called as ``run`` takes ``model`` forward on inputs, these and others.

    One that is not called has no calls. Raises ``CaptureError`` for one that gives what no graph can hold.
    """
    modules = {path: model.get_submodule(path) for path in paths}
    first = _calls(modules, lambda: run(inputs))
    second: dict[str, list[SeenCall]] | None = None
    for apart in (True, False):
        if second is None:
            # Whatever forward says of other sizes: then they do not vary.
            with suppress(Exception), preserved_rng([*model.parameters(), *inputs.tensors()]):
                second = _calls(modules, partial(run, other_sizes(model, inputs, ranges, apart)))
    found = {}
    for path, module in modules.items():
        again = second[path] if second is not None and len(second[path]) == len(first[path]) else ()
        calls = [(call, again[i] if again else None) for i, call in enumerate(first[path])]
        found[path] = KeptCalls(path, module, tuple(calls))
    return found


def _calls(modules: Mapping[str, nn.Module], run: Callable[[], None]) -> dict[str, list[SeenCall]]:
    found: dict[str, list[SeenCall]] = {path: [] for path in modules}
    given: list[tuple[TensorLike, ...]] = []  # of the calls that have begun

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        given.append(tuple(TensorLike.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)))

    with ExitStack() as stack:
        for path, module in modules.items():

            def end(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                found[path].append(_seen(path, given.pop(), output))

            stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end).remove)
        run()
    return found


def _seen(path: str, given: tuple[TensorLike, ...], output: Any) -> SeenCall:
    leaves, tree = tree_flatten(output)
    if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in leaves):
        raise CaptureError(f"{path} gives something else than tensors, which a graph would keep as it was.")
    try:
        keys = [keys for keys, leaf in tree_flatten_with_path(output)[0] if isinstance(leaf, Tensor)]
        ways = tuple(tuple(map(_step, each)) for each in keys)
    except (AttributeError, ValueError):
        raise CaptureError(f"{path} gives an object that no graph can take apart.") from None
    words = tuple(TensorLike.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return SeenCall(given, words, tree, ways)


def _step(key: Any) -> tuple[str, Any]:
    """A step into what a submodule gave, by PyTorch's own description of it."""
    for kind, name in (("item", "idx"), ("item", "key"), ("attribute", "name")):
        if hasattr(key, name):
            return kind, getattr(key, name)
    raise AttributeError(f"{key}")


def other_sizes(model: nn.Module, inputs: Inputs, ranges: Sequence[Range], apart: bool) -> Inputs:
    """The inputs with other sizes where they may vary: the batch, all sizes of tokens, those that have ranges.

    With ``apart``, what is one number in two dimensions becomes two.
    """
    batch = batch_size(inputs)
    leaves, places = tree_leaves((inputs.args, inputs.kwargs)), positions(model, inputs) if ranges else {}
    named = [(id(leaves[places[each.name]]), each.dim) for each in ranges]
    made: dict[int, Tensor] = {}  # one for each tensor, however often it is given

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            dims = {dim for owner, dim in named if owner == id(leaf)}
            dims |= {*range(leaf.dim())} if per_token(leaf) else {0} if leaf.dim() and leaf.shape[0] == batch else set()
            sizes = {dim: _other(leaf.shape[dim], dim if apart else 0) for dim in dims}
            made[id(leaf)] = brought_to(leaf, sizes)
        return made[id(leaf)]

    return Inputs(tree_map(other, inputs.args), tree_map(other, inputs.kwargs))


def _other(size: int, more: int) -> int:
    """About half a size, and so much more; something larger where that is none or the same."""
    half = size // 2 + more
    return size if size < 2 else half if 2 <= half < size else size + 1 + more


class _StandIn:
    """What comes first among the bases of a stand-in's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept: KeptCalls = getattr(type(self), _CALLS)
        call = kept.of(args, kwargs)
        tracing = traced_now()
        return call.on_fakes([*kept.module.parameters()]) if tracing is None else tracing.called(call)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse it: what the submodule assigns there itself is not seen, so neither is what this undoes."""
        kept: KeptCalls = getattr(type(self), _CALLS)
        if name != "training":
            raise CaptureError(
                f"What has {kept.path} inside assigns to its {name} in forward, which no graph can hold."
            )
        super().__setattr__(name, value)


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
    result.__class__ = type(base.__name__, (_StandIn, base), members)
    vars(result)["_modules"] = {}
    return result
