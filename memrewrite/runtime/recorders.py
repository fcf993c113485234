"""Hooks by which models of transformers record what their layers give. Torch only; part of every artifact.

The first call that is asked for hidden states or attentions, or that computes with some itself, registers them on its
layers and notes on the model that they are there (``transformers.utils.output_capturing``, as of 5.23). They do nothing
while no such call runs; what they do in one that is captured is in its graph.
"""

import weakref
from collections.abc import Mapping
from typing import Any

INSTALLED = "_output_capturing_hooks_installed"  # an attribute of a model, which is then True
_MODULE = "transformers.utils.output_capturing"


def shared_with(model: Any) -> property:
    """The note on a drop-in for ``model``, which is on both: both have the layers, and would register on them twice."""
    other = weakref.ref(model)

    def both(self: Any) -> list[dict[str, Any]]:
        return [vars(each) for each in (self, other()) if each is not None]

    def noted(self: Any) -> bool:
        return any(attributes.get(INSTALLED) for attributes in both(self))

    def note(self: Any, there: bool) -> None:
        for attributes in both(self):
            attributes[INSTALLED] = there

    return property(noted, note)


def is_recorder(hook: Any) -> bool:
    """Whether a hook is one of these."""
    return getattr(hook, "__module__", None) == _MODULE and hasattr(hook, "__globals__")


def matter(hooks: Mapping[int, Any]) -> bool:
    """Whether one of these hooks does something if it is called now."""
    return any(not is_recorder(hook) or _records(hook) for hook in hooks.values())


def _records(hook: Any) -> bool:
    collector = hook.__globals__.get("_active_collector")
    return collector is not None and collector.get() is not None
