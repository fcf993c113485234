"""What must still hold of a graph after a pass, beyond ``Graph.lint``: judged from observed effects before and after.

Values keep their dtype, shape, stride, device and whether they have a gradient; no value is read after its storage was
overwritten, and nothing that autograd keeps is. A graph may come with such writes of its own (the user's in-place
operations, which mean what they do), so only what a pass adds counts against it.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memrewrite.effects import Effects
from memrewrite.private import tree_leaves


@dataclass(frozen=True)
class Health:
    """How the values of a graph look, by node name, and what is wrong with it, a sentence each."""

    forms: dict[str, str]
    wrongs: frozenset[str]


def health(effects: Effects) -> Health:
    """The state of a graph as it was just observed; has to be taken before a pass changes it."""
    forms = {node.name: _form(node.meta["val"]) for node in effects.order if node.op != "get_attr"}
    return Health(forms, frozenset(_overwritten(effects)))


def broken(before: Health, after: Health) -> list[str]:
    """What a pass broke, a sentence each, given the graph before and after it; empty when all is well."""
    changed = [
        f"{name} was {before.forms[name]} and is {form}."
        for name, form in after.forms.items()
        if before.forms.get(name, form) != form
    ]
    return [*changed, *sorted(after.wrongs - before.wrongs)]


def _overwritten(effects: Effects) -> set[str]:
    """Reads of a value after its storage was written, and writes to what autograd keeps."""
    position = {node: i for i, node in enumerate(effects.order)}
    found: set[str] = set()
    for writer, facts in effects.of.items():
        for key in facts.writes - facts.statistics:
            if effects.storages[key].origin not in ("node", "input"):
                continue
            for holder in effects.order[: position[writer]]:
                held = effects.of[holder]
                if key in held.saved:
                    found.add(f"{writer.name} writes what autograd keeps for {holder.name}.")
                if key in held.outputs:
                    late = [user.name for user in holder.users if position[user] > position[writer]]
                    found |= {f"{name} reads {holder.name} after {writer.name} has overwritten it." for name in late}
    return found


def _form(value: Any) -> str:
    """The tensors in a node's value: dtype, shape, stride, device and whether they have a gradient."""
    return ", ".join(_tensor(leaf) if isinstance(leaf, Tensor) else "no tensor" for leaf in tree_leaves(value))


def _tensor(tensor: Tensor) -> str:
    gradient = "with" if tensor.requires_grad else "without"
    return f"{tensor.dtype} {tuple(tensor.shape)} strided {tensor.stride()} on {tensor.device.type} {gradient} gradient"
