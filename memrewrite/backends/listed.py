"""What a plan keeps and what it runs again, by operator."""

import operator
from collections import Counter

from torch import fx

from memrewrite.backends.facts import Facts
from memrewrite.backends.plan import Order
from memrewrite.report.text import operator_name


def kept_by(facts: Facts, order: Order) -> dict[str, int]:
    """The bytes that are kept by the operators that make them, most first; a storage counts once."""
    found: Counter[str] = Counter()
    makers = {s: facts.nodes[i] for i, made in enumerate(facts.makes) for s in made}
    for storage in sorted({s for node in order.saved for s in facts.holds[node]}):
        found[_name(makers[storage])] += facts.bytes[storage]
    return {name: size for name, size in found.most_common() if size}


def reruns(facts: Facts, order: Order) -> dict[str, int]:
    """How many nodes of each operator run again, most first; views and parts of tuples take nothing."""
    again = (item.node for item in order.items if item.region is not None)
    return dict(Counter(_name(facts.nodes[i]) for i in again if i not in facts.views).most_common())


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _name(node.args[0])
    return operator_name(str(node.target)) if node.op == "call_function" else node.op
