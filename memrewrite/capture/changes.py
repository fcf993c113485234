"""What forward changes besides its tensors, found by running it on fake ones: refused, or told, by name."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from memrewrite.records.errors import CaptureError
from memrewrite.state.attributes import Attributes
from memrewrite.workload.surroundings import Surroundings

COUNTED = (
    "{name} changes numbers each time forward runs (of {place}), which the program does not; count in the loop, or in "
    "a forward hook."
)


def always_matters(path: str, value: Any) -> bool:
    """Whether an attribute that got this value must not change, even once."""
    return isinstance(value, Tensor) or path.endswith((".training", ".requires_grad"))


def refuse_changes(
    name: str, attributes: Attributes, matters: Callable[[str, Any], bool] = lambda path, value: True
) -> None:
    """Raise ``CaptureError`` for an attribute of the model that has another value now, and ``matters``."""
    for path, value in attributes.changed():
        if matters(path, value):
            what = "a new tensor" if isinstance(value, Tensor) else "a new value"
            raise CaptureError(
                f"{name} assigns {what} to self.{path} in forward; a captured graph would keep the first one for ever. "
                "Update a buffer in place (copy_) instead; if forward sets it once and keeps it, call the model first."
            )


def refuse_left(name: str, around: Surroundings) -> None:
    """Raise ``CaptureError`` where tensors came to be that are in reach of its code."""
    if (place := next(around.got(), None)) is not None:
        raise CaptureError(
            f"{name} leaves a new tensor in {place} each time forward runs, which a captured graph would not do; "
            "return it, or keep it outside forward."
        )
