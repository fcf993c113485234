"""Attention, also written out, runs some texts or heads at a time: backward takes several times what it is given.

Before::

    return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, is_causal=True)

After::

    return attention_in_pieces(q, k, v, None, 8, is_causal=True)

So is attention that a model writes itself, whose scores never exist for all texts and heads then: before ::

    scores = torch.ops.aten.softmax.int(torch.ops.aten.matmul.default(q, k) * 0.125, -1)
    return torch.ops.aten.matmul.default(scores, v)

After::

    return in_pieces(chain_9b1f0c52d3aa, (0, 1, 2), -4, 8, q, k, v)

Texts and heads know nothing of each other, so that the numbers stay. Each piece is attended once more in backward, so
that it is done only where nothing else makes a step fit.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.groups import put
from memrewrite.passes.matching import inherit
from memrewrite.passes.spelling import by_name, operation, tensor
from memrewrite.passes.written_attention import DROPOUT, WrittenAttention, written_attention
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.runtime.attention import attention_in_pieces

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_OPTIONS = ("is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class AttentionInPieces:
    """Each is done in about ``pieces``: with more of them kernels have little to do, and what is around takes more."""

    name: ClassVar[str] = "attention_in_pieces"
    exact: ClassVar[bool] = False
    pieces: int = 8

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite every scaled dot-product attention of several texts or heads."""
        findings = Findings()
        accepted = [found for found in written_attention(effects) if self._accepts(found, findings)]
        for node in effects.order:
            if operation(node) != "scaled_dot_product_attention":
                continue
            given = by_name(node, _NAMES)
            if reason := _obstacle(given):
                findings.refuse(node, reason)
                continue
            findings.apply(node, f"{self.pieces} pieces of it run one after the other")
            arguments = (*(given[name] for name in _NAMES[:3]), given.get("attn_mask"), self.pieces)
            options = {name: given[name] for name in _OPTIONS if name in given}
            with graph_module.graph.inserting_before(node):
                new = graph_module.graph.call_function(attention_in_pieces, arguments, options)
            inherit(new, node)
            graph_module.graph.erase_node(node)
        replaced: dict[fx.Node, fx.Node] = {}
        for found in accepted:
            found.erase_unread()
            replaced |= put(graph_module.graph, found, found.call, replaced, found.copy)
        return findings.finish(graph_module)

    def _accepts(self, found: WrittenAttention, findings: Findings) -> bool:
        if not found.is_worth_it:
            return False
        if reason := found.obstacle():
            findings.refuse(found.softmax, reason)
            return False
        findings.apply(found.softmax, f"{found.pieces} pieces of what is around it run one after the other")
        return True


def _obstacle(given: dict[str, Any]) -> str | None:
    """Why an attention has to stay whole; None if it need not."""
    query, key, mask = (tensor(given.get(name)) for name in ("query", "key", "attn_mask"))
    if given.get("dropout_p"):
        return DROPOUT
    if query is None or key is None or query.dim() != 4 or key.shape[:1] != query.shape[:1]:
        return "It is of no texts and heads that are counted by themselves."
    if mask is not None and mask.requires_grad:
        return "Its mask is trained."
    if max(key.shape[:2]) < 2:
        return "It is of one text, and of one head of keys."
    return None
