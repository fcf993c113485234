"""An embedding and a head of one weight make one gradient of it, in place, and not two that are added up.

Before::

    x = torch.ops.aten.embedding.default(self.weight, tokens)
    logits = torch.ops.aten.linear.default(x, self.weight)

After::

    x, weight = tied_embedding(self.weight, tokens)
    logits = torch.ops.aten.linear.default(x, weight)

The gradient of the head is there from the beginning of backward on. That of the embedding, which is as large and comes
where backward ends, is then the rows of the words of this batch alone. So it is for embeddings that share a weight, and
for a head whose product the loop's loss makes some rows at a time, by the weight that the graph returns for it.
The sums are the original's to the last bit, in one call of the model. Of several before one backward, what belongs to a
call is added up before it joins the others, where autograd adds one after the other: of four gradients or more the last
bit may differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

from torch import fx

from memrewrite.capture.shared import is_read_elsewhere
from memrewrite.observe.effects import Effects
from memrewrite.passes.matching import inherit
from memrewrite.passes.spelling import by_name, operation
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.runtime.tied_embedding import tied_embedding
from memrewrite.torch_internals.operators import OpOverload

_OF_ATEN = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
_OF_FUNCTIONAL = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_OF_LINEAR = ("input", "weight", "bias")
_UNUSUAL = ("max_norm", "scale_grad_by_freq", "sparse")


@dataclass(frozen=True)
class TiedEmbeddings:
    """What reads the weight of an embedding later reads it by way of the embedding."""

    name: ClassVar[str] = "tied_embeddings"
    exact: ClassVar[bool] = True

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite every embedding whose weight heads or other embeddings read later."""
        findings = Findings()
        for readers in tuple(_matches(effects)):  # of the graph as it was observed
            if reason := _obstacle(readers, effects):
                findings.refuse(readers[0], reason)
            else:
                last = "the loss" if readers[-1].op == "output" else readers[-1].name
                findings.apply(readers[0], f"its gradient is added to that by {last} in place")
                _rewrite(readers, graph_module.graph, effects)
        return findings.finish(graph_module)


def _matches(effects: Effects) -> Iterator[tuple[fx.Node, ...]]:
    """What reads a parameter that is trained, in order, where the first is an embedding and not the only one."""
    for key, readers in effects.readers.items():
        first, *others = sorted(readers, key=effects.position.__getitem__)
        weight = _given(first).get("weight") if operation(first) == "embedding" else None
        if others and weight is not None and key in effects.of[weight].outputs and weight.meta["val"].requires_grad:
            yield first, *others


def _obstacle(readers: tuple[fx.Node, ...], effects: Effects) -> str | None:
    """Why they have to stay as they are; None if they need not."""
    if is_read_elsewhere(_given(readers[0])["weight"]):
        return "Its weight is read outside of this graph, too, and gradients would be added in another order."
    key = effects.of[_given(readers[0])["weight"]].outputs
    for node in readers:
        given = _given(node)
        if any(given.get(option) for option in _UNUSUAL):
            return f"{node.name} scales its gradient, makes it sparse, or writes its weight."
        read = _read_by(node, key, effects)
        at_once = read == [given.get("weight")] and list(node.args).count(read[0]) == 1
        if not at_once and not (len(read) == 1 and _gives_product(node, read[0])):
            return f"{node.name} reads its weight, too, and may share the gradient that it gives."
    if writer := next((node for node in effects.order if effects.of[node].writes & key), None):
        return f"{writer.name} writes its weight."
    return None


def _read_by(node: fx.Node, key: frozenset[int], effects: Effects) -> list[fx.Node]:
    """What gives it the weight."""
    return [each for each in node.all_input_nodes if effects.of[each].outputs & key]


def _gives_product(node: fx.Node, weight: fx.Node) -> bool:
    """Whether the program ends here, and gives what the product with the weight is made of once it is used."""
    leaves: Any = node.args[0]
    return node.op == "output" and weight not in leaves


def _rewrite(readers: tuple[fx.Node, ...], graph: fx.Graph, effects: Effects) -> None:
    """Let each read the weight by way of the last embedding before it."""
    weight = _given(readers[0])["weight"]
    by_now = [_read_by(node, effects.of[weight].outputs, effects)[0] for node in readers]
    for node, before in zip(readers, by_now, strict=True):
        if operation(node) != "embedding" or node is readers[-1]:
            node.replace_input_with(before, weight)
            continue
        given = _given(node)
        padding = given.get("padding_idx")
        arguments: tuple[Any, ...] = (weight, given.get("indices", given.get("input")))
        if padding is not None and padding != -1:
            arguments += (padding % len(weight.meta["val"]),)
        with graph.inserting_before(node):
            both = graph.call_function(tied_embedding, arguments)
            rows, alias = (graph.call_function(getitem, (both, i)) for i in range(2))
        both.meta = {name: value for name, value in node.meta.items() if name != "val"}
        alias.meta = {**both.meta, "val": weight.meta["val"]}
        inherit(rows, node)
        graph.erase_node(node)
        weight = alias


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of an embedding or a product with a weight, by name; none of any other node."""
    of = {"embedding": _OF_ATEN if isinstance(node.target, OpOverload) else _OF_FUNCTIONAL, "linear": _OF_LINEAR}
    return by_name(node, of.get(operation(node), ()))
