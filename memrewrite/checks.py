"""What must still hold of a graph after a pass, beyond ``Graph.lint``: judged from observed effects before and after.

Values keep their dtype, shape, stride, device and whether they have a gradient; no value is read after its storage was
overwritten, and nothing that autograd keeps is. A graph may come with such writes of its own (the user's in-place
operations, which mean what they do), so only what a pass adds counts against it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memrewrite.effects import Effects
from memrewrite.private import tree_leaves


@dataclass(frozen=True)
class Health:
    """How the values of a graph look, by node name, and what is wrong with it, a sentence each.

    ``gradients`` says which have a gradient; not of values written in place, which may have come by it only then.
    ``late`` are the nodes (reader, value, writer) that read a value after its storage was written.
    """

    forms: dict[str, str]
    gradients: dict[str, str]
    wrongs: frozenset[str]
    late: frozenset[tuple[str, str, str]]


def health(effects: Effects) -> Health:
    """The state of a graph as it was just observed; has to be taken before a pass changes it."""
    nodes = [node for node in effects.order if node.op != "get_attr"]
    written = {key for facts in effects.of.values() for key in facts.writes}
    forms = {node.name: _each(_form, node.meta["val"]) for node in nodes}
    settled = [node for node in nodes if not effects.of[node].outputs & written]
    gradients = {node.name: _each(_gradient, node.meta["val"]) for node in settled}
    return Health(forms, gradients, *_overwritten(effects))


def broken(before: Health, after: Health) -> list[str]:
    """What a pass broke, a sentence each, given the graph before and after it; empty when all is well."""
    changed = [
        f"{name} was {old[name]} and is {form}."
        for old, new in ((before.forms, after.forms), (before.gradients, after.gradients))
        for name, form in new.items()
        if old.get(name, form) != form
    ]
    # What stands in the place of late readers may read as late as they did.
    replaced = {(value, writer) for reader, value, writer in before.late if reader not in after.forms}
    late = [read for read in sorted(after.late - before.late) if read[1:] not in replaced]
    sentences = [f"{reader} reads {value} after {writer} has overwritten it." for reader, value, writer in late]
    return [*changed, *sorted(after.wrongs - before.wrongs), *sentences]


def _overwritten(effects: Effects) -> tuple[frozenset[str], frozenset[tuple[str, str, str]]]:
    """Writes to what autograd keeps, and reads of a value after its storage was written."""
    position = {node: i for i, node in enumerate(effects.order)}
    wrongs: set[str] = set()
    late: set[tuple[str, str, str]] = set()
    for writer, facts in effects.of.items():
        for key in facts.writes - facts.statistics:
            if effects.storages[key].origin not in ("node", "input"):
                continue
            for holder in effects.order[: position[writer]]:
                held = effects.of[holder]
                if key in held.saved:
                    wrongs.add(f"{writer.name} writes what autograd keeps for {holder.name}.")
                if key in held.outputs:
                    users = [user.name for user in holder.users if position[user] > position[writer]]
                    late |= {(user, holder.name, writer.name) for user in users}
    return frozenset(wrongs), frozenset(late)


def _each(say: Callable[[Tensor], str], value: Any) -> str:
    return ", ".join(say(leaf) if isinstance(leaf, Tensor) else "no tensor" for leaf in tree_leaves(value))


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} strided {tensor.stride()} on {tensor.device.type}"


def _gradient(tensor: Tensor) -> str:
    return f"{'with' if tensor.requires_grad else 'without'} gradient"
