"""A node as a call that can be made on other tensors: its operator and the signature of its arguments."""

import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.observe.node_effects import NodeEffects
from memrewrite.records.kernel_launch import Named
from memrewrite.targets.transients import like, made
from memrewrite.torch_internals.operators import OpOverload
from memrewrite.torch_internals.pytrees import tensors_in, tree_leaves, tree_map
from memrewrite.torch_internals.spread import Spread, local_part

_PLAIN = (
    *(int, float, complex, bool, str, types.NoneType, types.EllipsisType, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, Named),
)
_FIXED = ("torch", "_operator")  # the packages whose functions are the same in every process with this version


@dataclass(frozen=True)
class Argument:
    """A tensor argument: which one (the same tensor given twice is one), its signature, whether it has a gradient.

    Of one that is spread over a mesh, the signature is that of its part here, and ``spread`` says how. It is ``known``
    where its values may decide what a call does.
    """

    number: int
    like: Any
    trained: bool
    spread: Spread | None = None
    known: Tensor | None = field(default=None, compare=False, repr=False)

    def make(self, written: bool) -> Tensor:
        """A real tensor like it, of numbers between 0 and 1: with equal ones a product takes less power and time.

        In a call that has ``written`` arguments it is no leaf, as autograd lets no one write those.
        """
        tensor: Tensor = made(self.like) if self.known is None else self.known.clone()
        if tensor.is_floating_point():
            whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
            whole.uniform_()
        tensor = tensor if self.spread is None else self.spread.of(tensor)
        tensor.requires_grad_(self.trained)
        return tensor.clone() if self.trained and written else tensor


@dataclass(frozen=True)
class _Body:
    """The graph that a node of higher order runs."""

    module: fx.GraphModule

    def __repr__(self) -> str:
        return str(self.module.graph)


@dataclass(frozen=True)
class Call:
    """One distinct call. ``text`` is its signature, equal for equal calls; ``grad`` says that it has a backward.

    ``lasting`` says that the operator is PyTorch's own, so that the signature means the same in another process.
    """

    text: str
    target: Callable[..., Any] | str
    args: Any
    kwargs: dict[str, Any]
    amp: torch.dtype | None
    grad: bool
    writes: bool
    lasting: bool

    def prepared(self) -> tuple[Callable[[], Any], list[Tensor]]:
        """A function that makes the call on real tensors, and those."""
        numbered: dict[int, Tensor] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Argument):
                return leaf.module if isinstance(leaf, _Body) else leaf
            if leaf.number not in numbered:
                numbered[leaf.number] = leaf.make(self.writes)
            return numbered[leaf.number]

        args, kwargs = tree_map(real, (self.args, self.kwargs))

        def run() -> Any:
            if isinstance(self.target, str):
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            return self.target(*args, **kwargs)

        return run, list(numbered.values())


def call_of(
    node: fx.Node,
    facts: NodeEffects,
    amp: torch.dtype | None,
    module: nn.Module | None = None,
    known: Mapping[fx.Node, Tensor] = MappingProxyType({}),
) -> Call | None:
    """The call a node is, by the fake values in ``meta["val"]``; of ``module``, where that is what it calls.

    What nodes give is ``known`` of some.

    None where it takes no tensor (it may switch a mode, or makes one from nothing) or gives and writes none (it may
    assert what does not hold for other values), where it takes anything but tensors and plain values, and for picking
    from a tuple, which is no work.
    """
    if node.op not in ("call_function", "call_method") and module is None:
        return None
    numbers: dict[int, int] = {}

    def described(leaf: Any) -> Any:
        if facts.opaque and isinstance(leaf, fx.GraphModule):
            return _Body(leaf)
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        number, spread = numbers.setdefault(id(leaf), len(numbers)), Spread.like(leaf)
        return Argument(number, like(local_part(leaf)), leaf.requires_grad, spread, values.get(id(leaf)))

    values = {id(each.meta["val"]): value for each, value in known.items()}
    given = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    args, kwargs = tree_map(described, given)
    plain = all(isinstance(leaf, (Argument, _Body, *_PLAIN)) for leaf in tree_leaves((args, kwargs)))
    picks = node.target is operator.getitem and not isinstance(args[0], Argument)
    results = tensors_in(node.meta["val"])
    if not plain or not numbers or not (results or facts.writes) or picks:
        return None
    grad = any(result.requires_grad for result in results)
    name, lasting = _name(node.target)
    text = f"{name} {args!r} {kwargs!r} amp={amp} grad={grad}"
    return Call(
        text, node.target if module is None else module, args, dict(kwargs), amp, grad, bool(facts.writes), lasting
    )


def _name(target: Any) -> tuple[str, bool]:
    if isinstance(target, str):
        return f"method {target}", True
    if isinstance(target, OpOverload):
        return str(target), target.namespace == "aten"
    module = str(getattr(target, "__module__", None) or getattr(type(target), "__module__", ""))
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", target))
    return f"{module}.{name}", module.partition(".")[0] in _FIXED
