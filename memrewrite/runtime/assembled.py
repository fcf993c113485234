"""A model whose parts run programs, and itself one that calls them. Torch only."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from memrewrite.runtime.dropin import Program, build, graft

Written = Mapping[str, tuple[Program, dict[str, Tensor]]]
"""Programs and the constants they hold, by the path of the submodule that runs them, "" for the model itself."""


def assembled(model: nn.Module, written: Written, plain: dict[str, list[Any]] | None = None) -> nn.Module:
    """A drop-in for ``model`` that runs what is ``written`` for its parts; ``plain`` as in ``build``.

    Parts are built first, so that the program of the model, if there is one beside theirs, finds them.
    """
    made = {
        path: build(model.get_submodule(path), *of, (plain or {}).get(path)) for path, of in written.items() if path
    }
    result = graft(model, made) if made else model
    return build(result, *written[""], (plain or {}).get("")) if "" in written else result
