"""Cross-entropy over many classes, such as a vocabulary, runs some rows at a time and keeps only the logits.

Before::

    logits = x.bfloat16()
    return torch.ops.aten.cross_entropy_loss.default(logits.float(), self.labels)

After::

    logits = x.bfloat16()
    return chunked_cross_entropy(logits, self.labels, torch.float32, 1, -100, 8)

Every bit stays the same. Backward computes the softmax again, so it is done only where the step would not fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.matching import between, erase, inherit
from memrewrite.passes.spelling import by_name, operand, operation, tensor
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.runtime.cross_entropy import AT_ONCE, REDUCTIONS, chunked_cross_entropy, rows_of, too_few

ARGUMENTS = {
    "cross_entropy_loss": ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing"),
    "cross_entropy": (
        *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
    ),
}
NO_INDICES = "Its targets are not one class index for each row of logits."
VIEWS = ("view", "reshape", "flatten", "_unsafe_view", "contiguous")
_CASTS = ("to", "float", "_to_copy")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Cross-entropy keeps the logits alone and makes everything else of about ``elements`` logits at a time at most."""

    name: ClassVar[str] = "chunked_cross_entropy"
    exact: ClassVar[bool] = True
    elements: int = AT_ONCE

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite every cross-entropy of class indices that has more than a few chunks of logits."""
        findings = Findings()
        for found in list(filter(None, map(match, effects.order))):
            if reason := self.check(found, effects):
                findings.refuse(found.root, reason)
            else:
                self.rewrite(found)
                findings.apply(found.root, "cross-entropy keeps the logits alone and makes the rest in chunks of rows")
        return findings.finish(graph_module)

    def check(self, found: "Found", effects: Effects) -> str | None:
        """Why it has to stay as it is; None if it need not."""
        if found.extra:
            return f"It has {found.extra}, which the chunked form has not."
        if unfit := not_in_rows(found.logits, found.target, self.elements):
            return unfit
        return between(effects, found.root, found.inner, found.source) if found.inner else None

    def rewrite(self, found: "Found") -> None:
        """Put the chunked form in the root's place; a cast of the logits becomes part of it."""
        logits = found.logits.meta["val"]
        rows = rows_of(logits.numel(), logits.shape[1], self.elements)
        dtype = torch.float32 if found.inner else None
        graph, logits = found.root.graph, found.source
        with graph.inserting_before(found.root):
            for view in found.inner[1:]:
                copied = graph.node_copy(view, lambda node: node)
                copied.replace_input_with(operand(view), logits)
                logits = copied
            arguments = (logits, found.target, dtype, found.reduction, found.ignore_index, rows)
            new = graph.call_function(chunked_cross_entropy, arguments)
        inherit(new, found.root)
        erase([found.root, *reversed(found.inner)])


@dataclass(frozen=True)
class Found:
    """A match: ``root`` is the cross-entropy of ``logits``.

    These come from ``source`` through ``inner``: a cast to float32 and the views after it, nothing where there is none.
    ``extra`` is an option the chunked form does not have.
    """

    root: fx.Node
    logits: fx.Node
    target: fx.Node
    source: fx.Node
    inner: tuple[fx.Node, ...]
    reduction: int
    ignore_index: int
    extra: str


def not_in_rows(logits: fx.Node, target: fx.Node, elements: int) -> str | None:
    """Why a cross-entropy cannot, or need not, be made of about ``elements`` logits at a time; None if it may."""
    given, classes = tensor(logits), tensor(target)
    if given is None or classes is None or given.dim() != 2 or classes.dim() != 1 or classes.dtype != torch.int64:
        return NO_INDICES
    return few(given, elements)


def few(logits: Tensor, elements: int) -> str | None:
    """What is said of logits that are made at once all the same; None of those that are more than two parts."""
    return f"Its {logits.numel()} logits are too few to be worth it." if too_few(logits.numel(), elements) else None


def match(root: fx.Node) -> Found | None:
    """The cross-entropy that ``root`` is, with the cast of its logits where nothing else uses that."""
    names = ARGUMENTS.get(operation(root))
    if names is None:
        return None
    given = by_name(root, names)
    logits, target, reduction = given.get(names[0]), given.get("target"), given.get("reduction", "mean")
    if not isinstance(logits, fx.Node) or not isinstance(target, fx.Node):
        return None
    chain = tuple(_chain(root, logits))
    inner = chain[::-1] if chain and _is_cast(chain[-1]) else ()
    return Found(
        root=root,
        logits=logits,
        target=target,
        source=operand(inner[0]) if inner else logits,
        inner=inner,
        reduction=REDUCTIONS.get(reduction, reduction),
        ignore_index=given.get("ignore_index", -100),
        extra=_extra(given),
    )


def _chain(root: fx.Node, logits: Any) -> Iterator[fx.Node]:
    """From the logits upwards the views that nothing else uses, up to a cast."""
    user = root
    while isinstance(logits, fx.Node) and list(logits.users) == [user]:
        if operation(logits) not in VIEWS and not _is_cast(logits):
            return
        yield logits
        if _is_cast(logits):
            return
        user, logits = logits, operand(logits)


def _is_cast(node: fx.Node) -> bool:
    """Whether it turns numbers of 16 bits into float32 and does nothing else."""
    before, after = tensor(operand(node)), tensor(node)
    if operation(node) not in _CASTS or before is None or after is None:
        return False
    return before.dtype in _HALF and after.dtype == torch.float32 and before.device == after.device


def _extra(given: dict[str, Any]) -> str:
    if given.get("weight") is not None:
        return "class weights"
    if given.get("label_smoothing", 0.0) != 0:
        return "label smoothing"
    old = given.get("size_average") is not None or given.get("reduce") is not None
    return "a deprecated reduction" if old else ""
