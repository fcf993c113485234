"""The product with a head and the cross-entropy of its logits become one, which makes some rows of logits at a time.

Before::

    logits = torch.ops.aten.linear.default(x, self.weight)
    return torch.ops.aten.cross_entropy_loss.default(logits, self.labels)

After::

    return linear_cross_entropy(x, self.weight, None, self.labels, None, (), 1, -100, 0.0, 8, True, False)

Wherever the logits are of no other use: casts, scales and soft caps on the way are made of the same rows, and views and
slices become those of the input. Classes may be the second dimension, and it may be ``nll_loss(log_softmax(logits))``
or logarithms of single probabilities, ``log_softmax(logits).gather(-1, index)``. Gradients are made in forward, of the
same logits. They take what they would take in backward, which begins where forward ends; of several losses those of the
last, of the others backward makes the logits again. The gradient of the head is added up over chunks of rows, so it is
done only where that saves memory or time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.chunked_cross_entropy import (
    ARGUMENTS,
    NO_INDICES,
    VIEWS,
    few,
    not_in_rows,
)
from memrewrite.passes.matching import between, erase, inherit, shared
from memrewrite.passes.spelling import CASTS, by_name, number, operand, operation, options, tensor
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.runtime.cross_entropy import AT_ONCE, REDUCTIONS, rows_of
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy

aten = torch.ops.aten
_RETURNED = (
    "The model returns its logits; returns='lazy' makes them when they are read, returns='loss' leaves them out."
)
_SCALED = ("mul", "div", "add", "sub")
_OF_LOGARITHMS = {
    "nll_loss": ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "nll_loss_nd": ("self", "target", "weight", "reduction", "ignore_index"),
    "gather": ("self", "dim", "index"),
}
_NOT_IGNORED = -(2**31)  # no index


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The head and its loss make about ``elements`` logits at a time at most, and those of ``rows`` at least.

    ``fused`` has what is computed of them compiled.
    """

    name: ClassVar[str] = "linear_cross_entropy"
    exact: ClassVar[bool] = False
    elements: int = AT_ONCE
    rows: int = 0
    fused: bool = False

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite every cross-entropy of class indices whose logits come from a product and go nowhere else."""
        findings = Findings()
        losses = list(filter(None, map(match, effects.order)))
        for found in losses:
            if reason := self.check(found, effects):
                findings.refuse(found.root, reason)
            else:
                self.rewrite(found, early=found is losses[-1] and found.reduction != REDUCTIONS["none"])
                findings.apply(found.root, "the head and its cross-entropy make some rows of logits at a time")
        return findings.finish(graph_module)

    def check(self, found: "Found", effects: Effects) -> str | None:
        """Why it has to stay as it is; None if it need not."""
        if unfit := _unfit(found, self.elements):
            return unfit
        if used := shared(found.inner, found.root):
            returned = any(user.op == "output" for node in found.inner for user in node.users)
            return _RETURNED if returned else used
        if odd := next(_odd(found), None):
            return f"Its logits come through {operation(odd) or odd.name}, which is not done row by row."
        read = (found.hidden, *(node for node in (found.weight, found.bias) if node is not None))
        return next(filter(None, (between(effects, found.root, found.inner, each) for each in read)), None)

    def rewrite(self, found: "Found", early: bool) -> None:
        """Put the one operation in the root's place; views and slices of the logits become those of its input.

        Gradients are made in forward if it is ``early``.
        """
        graph, hidden = found.root.graph, found.hidden
        classes, width = found.weight.meta["val"].shape
        rows = max(rows_of(found.inner[0].meta["val"].numel(), classes, self.elements), self.rows)
        with graph.inserting_before(found.root):
            for view in filter(_keeps_rows, found.inner[1:]):
                hidden = _same_view(graph, view, hidden, width)
            steps = tuple(step for node in found.inner[1:] if (step := _step(node, found.logarithm)))
            loss = found.reduction, found.ignore_index, found.label_smoothing, rows, early, early and self.fused
            target, one_by_one = found.target, found.target.meta["val"].dim() > 1
            if one_by_one:
                hidden = graph.call_function(aten.flatten.using_ints, (hidden, 0, -2))
                target = graph.call_function(aten.flatten.using_ints, (target,))
            arguments = (hidden, found.weight, found.bias, target, found.class_weight, steps, *loss)
            new = graph.call_function(linear_cross_entropy, arguments)
            if one_by_one and found.reduction == REDUCTIONS["none"]:
                new = graph.call_function(aten.view_as.default, (new, found.target))
            if found.gathered:  # autocast may have losses in another type than logarithms
                new = graph.call_function(aten.neg.default, (new,))
                new = graph.call_function(aten.to.dtype, (new, found.root.meta["val"].dtype))
        inherit(new, found.root)
        erase([found.root, *reversed(found.inner)])


@dataclass(frozen=True)
class Found:
    """A match: ``root`` is the cross-entropy of logits that come from a product through ``inner``, it the first.

    Of ``inner`` ``logarithm`` takes that of the softmax, and ``moved`` has the classes in the second dimension.
    """

    root: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    inner: tuple[fx.Node, ...]
    target: fx.Node
    class_weight: fx.Node | None
    reduction: int
    ignore_index: int
    label_smoothing: float
    logarithm: fx.Node | None
    moved: fx.Node | None

    @property
    def gathered(self) -> bool:
        """Whether it is no loss but the logarithms of single probabilities."""
        return operation(self.root) == "gather"


def match(root: fx.Node) -> Found | None:
    """The cross-entropy of logits that ``root`` is."""
    name, gathered = operation(root), operation(root) == "gather"
    names = ARGUMENTS.get(name) or _OF_LOGARITHMS.get(name)
    if names is None:
        return None
    given = by_name(root, names)
    old = given.get("size_average") is not None or given.get("reduce") is not None
    inner = tuple(_chain(given.get(names[0])))[::-1]
    target, reduction = given.get("index" if gathered else "target"), given.get("reduction", "mean")
    if old or not inner or operation(inner[0]) != "linear" or not isinstance(target, fx.Node):
        return None
    logarithm = next((node for node in inner if operation(node) == "log_softmax"), None)
    if logarithm is None and name in _OF_LOGARITHMS:
        return None
    product = by_name(inner[0], ("input", "weight", "bias"))
    return Found(
        root=root,
        hidden=product["input"],
        weight=product["weight"],
        bias=product.get("bias"),
        inner=inner,
        target=target,
        class_weight=given.get("weight"),
        reduction=REDUCTIONS["none"] if gathered else REDUCTIONS.get(reduction, reduction),
        ignore_index=_NOT_IGNORED if gathered else given.get("ignore_index", -100),
        label_smoothing=given.get("label_smoothing", 0.0),
        logarithm=logarithm if name in _OF_LOGARITHMS else None,
        moved=None if gathered else _moved(inner),
    )


def steps_to(logits: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, tuple[Any, ...]] | None:
    """What logits are the product of, with which weight and bias, and the steps from there; None for any others."""
    inner = tuple(_chain(logits))[::-1]
    steps = tuple(map(_step, inner[1:]))
    if not inner or operation(inner[0]) != "linear" or None in steps:
        return None
    product = by_name(inner[0], ("input", "weight", "bias"))
    return product["input"], product["weight"], product.get("bias"), steps


def _unfit(found: Found, elements: int) -> str | None:
    """Why its logits are not, or need not be, made some rows at a time; None if they may."""
    if found.moved is None and not found.gathered:
        return not_in_rows(found.inner[-1], found.target, elements)
    logits, classes = found.inner[-1].meta["val"], tensor(found.target)
    rows = (*logits.shape[:-1], 1) if found.gathered else (*logits.shape[:1], *logits.shape[2:])
    fits = classes is not None and classes.dtype == torch.int64 and classes.shape == rows and logits.dim() > 1
    if not fits or (found.gathered and _dim(found.root, 1, "dim", 0) != logits.dim() - 1):
        return NO_INDICES
    return few(logits, elements)


def _odd(found: Found) -> Iterator[fx.Node]:
    """What is not done row by row of what the logits come through, or is done to logarithms of probabilities."""
    of_logarithms = False
    for node in found.inner[1:]:
        if node is found.logarithm:
            of_logarithms, moved = True, found.moved is not None and found.moved < node
            if _dim(node, 1, "dim", -1) != (1 if moved else node.meta["val"].dim() - 1):
                yield node
        elif node is not found.moved and not _keeps_rows(node) and (of_logarithms or _step(node) is None):
            yield node


def _moved(inner: tuple[fx.Node, ...]) -> fx.Node | None:
    """What has the classes of logits in the second dimension at the end, but for the logarithm of their softmax."""
    ends = [node for node in reversed(inner) if operation(node) != "contiguous"]
    last = next((node for node in ends if operation(node) != "log_softmax"), inner[0])
    return last if last in ends[:2] and _moves_classes(last) else None


def _moves_classes(node: fx.Node) -> bool:
    """Whether a node has the last dimension of what it is given as its second, all else in order."""
    before = tensor(operand(node))
    if before is None or before.dim() < 3 or operation(node) not in ("transpose", "permute"):
        return False
    count = before.dim()
    given = [each for value in options(node) for each in (value if isinstance(value, list | tuple) else (value,))]
    if not all(isinstance(dim, int) for dim in given):
        return False
    dims = [dim % count for dim in given]
    if operation(node) == "transpose":
        return count == 3 and sorted(dims) == [1, 2]
    return dims == [0, count - 1, *range(1, count - 1)]


def _chain(logits: Any) -> Iterator[fx.Node]:
    """From the logits upwards to the product that they come from, if they do."""
    while isinstance(logits, fx.Node) and logits.op in ("call_function", "call_method"):
        yield logits
        if operation(logits) == "linear":
            return
        logits = operand(logits)


def _step(node: fx.Node, logarithm: fx.Node | None = None) -> tuple[Any, ...] | None:
    """What a node does to each number of its input, as a method of tensors and its arguments; None if it is no such.

    Of the ``logarithm`` that is the cast before it.
    """
    name, before, after = operation(node), tensor(operand(node)), tensor(node)
    if before is None or after is None or before.shape != after.shape or before.device != after.device:
        return None
    if (name in CASTS or node is logarithm) and after.is_floating_point():
        return ("to", after.dtype)
    if name == "tanh" and not options(node):
        return ("tanh",)
    given = options(node)
    if name in _SCALED and node.args and len(given) == 1 and number(given[0]):
        return (name, given[0])
    return None


def _keeps_rows(node: fx.Node) -> bool:
    """Whether it gives some of the rows of its input, in their order."""
    before, after = tensor(operand(node)), tensor(node)
    if before is None or after is None or before.dim() < 1 or after.dim() < 1 or before.shape[-1] != after.shape[-1]:
        return False
    if operation(node) == "slice":
        return _dim(node, 1, "dim", 0) != before.dim() - 1 or before.shape == after.shape
    if operation(node) == "flatten":
        return _dim(node, 2, "end_dim", -1) != before.dim() - 1
    return operation(node) in VIEWS and (operation(node) == "contiguous" or _sizes(node) is not None)


def _dim(node: fx.Node, place: int, name: str, default: int) -> int:
    """The dimension that an argument of a view names, counted from the first."""
    dim: Any = node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
    return int(dim) % operand(node).meta["val"].dim()


def _sizes(node: fx.Node) -> list[Any] | None:
    """The sizes that a view is given, None for another spelling."""
    sizes = node.args[1:] if len(node.args) != 2 else node.args[1]
    return list(sizes) if isinstance(sizes, list | tuple) and sizes and not node.kwargs else None


def _same_view(graph: fx.Graph, view: fx.Node, hidden: fx.Node, width: int) -> fx.Node:
    """What a view of the logits is of the rows that they come from."""
    if operation(view) == "contiguous":
        return hidden
    sizes = None if operation(view) in ("slice", "flatten") else _sizes(view)
    if sizes is not None:
        new = graph.call_function(torch.ops.aten.reshape.default, (hidden, [*sizes[:-1], width]))
        new.meta = {key: value for key, value in view.meta.items() if key != "val"}
        return new
    new = graph.node_copy(view, lambda node: node)
    new.replace_input_with(operand(view), hidden)
    return new
