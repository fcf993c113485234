"""``x * sigmoid(beta * x)``, however it is spelled, becomes one operation that saves ``x`` alone.

Before::

    mul = torch.ops.aten.mul.Tensor(x, self.beta)
    sigmoid = torch.ops.aten.sigmoid.default(mul)
    return torch.ops.aten.mul.Tensor(sigmoid, x)

After::

    return swish(x, self.beta)

Where beta is 1, ``torch.ops.aten.silu.default(x)`` stands there instead.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.matching import erase, inherit, obstacle, shared
from memrewrite.passes.spelling import number, operand, operands, operation, options
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.runtime.swish import exact_swish, swish


@dataclass(frozen=True)
class Swish:
    """Every spelling of ``x * sigmoid(beta * x)`` becomes silu or ``memrewrite.runtime.swish``.

    ``exact_forward`` keeps the forward bit-equal for ``beta`` 1 too, where silu may differ by 1 ulp in float32
    (more in half types, nearer to float64). The backward is rounded in another order either way.
    """

    name: ClassVar[str] = "swish"
    exact: ClassVar[bool] = False
    exact_forward: bool = False

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite every Swish whose sigmoid is its own."""
        findings = Findings()
        accepted = []
        for found in filter(None, map(match, effects.order)):
            if reason := check(found, effects):
                findings.refuse(found.root, reason)
            else:
                accepted.append(found)
                findings.apply(found.root, f"x * sigmoid({'x' if found.scaled is None else 'beta * x'}) saves x alone")
        for found in reversed(accepted):  # so that no match reads a root that is gone already
            rewrite(found, self.exact_forward)
        return findings.finish(graph_module)


@dataclass(frozen=True)
class Found:
    """A match: ``root = x * gate``, ``gate = sigmoid(scaled)``, ``scaled = beta * x`` (None where beta is 1)."""

    root: fx.Node
    gate: fx.Node
    scaled: fx.Node | None
    x: fx.Node
    beta: Any


def match(root: fx.Node) -> Found | None:
    """The Swish that ``root`` multiplies out, in either order of operands."""
    if operation(root) != "mul" or len(operands(root)) != 2:
        return None
    left, right = operands(root)
    for x, gate in ((left, right), (right, left)):
        if isinstance(x, fx.Node) and operation(gate) == "sigmoid" and not options(gate):
            scaled = operand(gate)
            if scaled is x:
                return Found(root, gate, None, x, 1.0)
            beta = _factor(scaled, x)
            if beta is not None:
                return Found(root, gate, scaled, x, beta)
    return None


def check(found: Found, effects: Effects) -> str | None:
    """Why the match has to stay written out; None if it need not."""
    if isinstance(found.beta, fx.Node) and _depends_on_input(found.beta):
        return f"Its beta {found.beta.name} is computed from the model's input, not a number or a parameter."
    inner = [found.gate] if found.scaled is None else [found.scaled, found.gate]
    return shared([found.gate], found.root) or obstacle(effects, found.root, inner, found.x)


def rewrite(found: Found, exact_forward: bool) -> None:
    """Put the one operation in the root's place and erase what nothing uses any more."""
    graph = found.root.graph
    with graph.inserting_before(found.root):
        if found.scaled is not None:
            new = graph.call_function(swish, (found.x, found.beta))
        else:
            new = graph.call_function(exact_swish if exact_forward else torch.ops.aten.silu.default, (found.x,))
    inherit(new, found.root)
    erase([found.root, found.gate, *([found.scaled] if found.scaled else [])])


def _factor(scaled: Any, x: fx.Node) -> Any:
    """``beta`` where ``scaled`` is ``beta * x`` or ``-x``, else None."""
    if operation(scaled) == "neg" and operand(scaled) is x:
        return -1.0
    if operation(scaled) != "mul" or len(operands(scaled)) != 2:
        return None
    left, right = operands(scaled)
    beta = left if right is x else right if left is x else None
    return beta if number(beta) or isinstance(beta, fx.Node) else None


def _depends_on_input(node: fx.Node) -> bool:
    return node.op == "placeholder" or any(_depends_on_input(source) for source in node.all_input_nodes)
