"""A call in a graph that computes a chain of other calls at once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from memrewrite.runtime.fused import fused


@dataclass(frozen=True)
class ChainCall:
    """The target of a node that computes ``chain``, whose placeholders are the arguments that the node has.

    Those of them that ``trained`` counts need a gradient, and for that backward needs those that ``keeps`` counts.
    """

    chain: fx.GraphModule
    trained: tuple[int, ...]
    keeps: tuple[int, ...]

    def __call__(self, *given: Any) -> Any:
        """Compute it."""
        return fused(self._function, self.trained, self.keeps, *given)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        def function(*given: Any) -> Any:
            return self.chain(*given)

        function.__name__ = self.__name__
        return function

    @cached_property
    def __name__(self) -> str:
        """The same for all that compute the same."""
        return f"chain_{hashlib.sha256(self.chain.code.encode()).hexdigest()[:12]}"

    @property
    def __module__(self) -> str:  # type: ignore[override]
        return __name__
