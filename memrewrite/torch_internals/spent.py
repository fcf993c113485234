"""What stands for a gradient that is gone. No public function makes a tensor without memory (PyTorch 2.11 to 2.15)."""

from typing import Any

import torch
from torch import Tensor

from memrewrite.records.errors import UsageError
from memrewrite.torch_internals.versions import require

require("Tensor._make_wrapper_subclass")

_SPENT = (
    "The gradient of a parameter is gone: its optimizer took its step while backward ran (step_in_backward). Clipping, "
    "a gradient scaler, accumulation over several backward passes and whatever else asks for gradients needs an "
    "optimizer as it was; so does a second backward pass before zero_grad()."
)
_ATEN = torch.ops.aten
_MOVES = {_ATEN.detach.default, _ATEN.alias.default, _ATEN._to_copy.default}
"""What becomes of the gradients of a model that is moved or cast."""


class Spent(Tensor):
    """What stands for the gradient of ``like``: it has no memory, and says that it is gone when something is asked."""

    @staticmethod
    def __new__(cls, like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> "Spent":
        """One in the place of the gradient of ``like``, or of a copy of that."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        if func not in _MOVES:
            raise UsageError(_SPENT)
        given = kwargs or {}
        return cls(args[0], given.get("dtype"), given.get("device"))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Spent({tuple(self.shape)}, {self.dtype})"
