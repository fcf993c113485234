"""What must still hold of a graph after a pass, beyond ``Graph.lint``: judged from observed effects before and after.

Values keep their dtype, shape, stride, device and whether they have a gradient; no value is read after its storage was
overwritten, and nothing that autograd keeps is. A graph may come with such writes of its own (the user's in-place
operations, which mean what they do), so only what a pass adds counts against it.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from memrewrite.observe.effects import Effects
from memrewrite.records.tensor_like import strides_between
from memrewrite.torch_internals.pytrees import tree_leaves

Wrong = tuple[str, ...]  # a sentence with gaps, and the names of nodes that fill them
_KEPT = "{} writes what autograd keeps for {}."
_LATE = "{} reads {} after {} has overwritten it."


@dataclass(frozen=True)
class Health:
    """How the values of a graph look, by node name, and what is wrong with it: a sentence with the names of its nodes.

    ``gradients`` says which have a gradient; not of values written in place, which may have come by it only then.
    """

    forms: dict[str, str]
    gradients: dict[str, str]
    wrongs: frozenset[Wrong]


def health(effects: Effects) -> Health:
    """The state of a graph as it was just observed; has to be taken before a pass changes it."""
    nodes = [node for node in effects.order if node.op != "get_attr"]
    forms = {node.name: _each(_form, node.meta["val"]) for node in nodes}
    settled = [node for node in nodes if not effects.of[node].outputs & effects.written]
    gradients = {node.name: _each(_gradient, node.meta["val"]) for node in settled}
    return Health(forms, gradients, frozenset(_overwritten(effects)))


def broken(before: Health, after: Health) -> list[str]:
    """What a pass broke, a sentence each, given the graph before and after it; empty when all is well."""
    changed = [
        f"{name} was {old[name]} and is {form}."
        for old, new in ((before.forms, after.forms), (before.gradients, after.gradients))
        for name, form in new.items()
        if old.get(name, form) != form
    ]
    new = [
        wrong
        for wrong in sorted(after.wrongs - before.wrongs)
        if not any(_stands_for(wrong, old, before, after) for old in before.wrongs)
    ]
    return [*changed, *(sentence.format(*names) for sentence, *names in new)]


def _stands_for(wrong: Wrong, old: Wrong, before: Health, after: Health) -> bool:
    """Whether a wrong is one that was there before, but for nodes that a pass has put in the place of others."""
    return all(
        now == then or (now not in before.forms and then not in after.forms)
        for now, then in zip(wrong, old, strict=False)
    )


def writes_what_is_kept(effects: Effects) -> bool:
    """Whether a node writes what autograd keeps for one before it, so that backward would raise."""
    return any(wrong[0] == _KEPT for wrong in _overwritten(effects))


def _overwritten(effects: Effects) -> set[Wrong]:
    """Reads of a value after its storage was written, and writes to what autograd keeps."""
    position = effects.position
    holding: dict[int, list[fx.Node]] = defaultdict(list)
    for node, facts in effects.of.items():
        for key in facts.saved | facts.outputs:
            holding[key].append(node)
    found: set[Wrong] = set()
    for writer, facts in effects.of.items():
        for key in facts.writes - facts.statistics:
            if effects.storages[key].origin not in ("node", "input"):
                continue
            for holder in (node for node in holding[key] if position[node] < position[writer]):
                held = effects.of[holder]
                if key in held.saved:
                    found.add((_KEPT, writer.name, holder.name))
                if key in held.outputs:
                    late = [user.name for user in holder.users if position[user] > position[writer]]
                    found |= {(_LATE, name, holder.name, writer.name) for name in late}
    return found


def _each(say: Callable[[Tensor], str], value: Any) -> str:
    return ", ".join(say(leaf) if isinstance(leaf, Tensor) else "no tensor" for leaf in tree_leaves(value))


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} strided {strides_between(tensor)} on {tensor.device.type}"


def _gradient(tensor: Tensor) -> str:
    return f"{'with' if tensor.requires_grad else 'without'} gradient"
