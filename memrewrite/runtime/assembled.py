"""A model whose parts run programs, and itself one that calls them. Torch only."""

from typing import Any

from torch import Tensor, nn

from memrewrite.runtime.dropin import Program, build, graft


def assembled(
    model: nn.Module,
    written: dict[str, tuple[Program, dict[str, Tensor]]],
    plain: dict[str, list[Any]] | None = None,
) -> nn.Module:
    """A drop-in for ``model`` by programs and constants, by the path of what runs them; ``plain`` as in ``build``.

    Parts are built first, so that the program of the model, if there is one beside theirs, finds them.
    """
    made = {
        path: build(model.get_submodule(path), *of, (plain or {}).get(path)) for path, of in written.items() if path
    }
    result = graft(model, made) if made else model
    return build(result, *written[""], (plain or {}).get("")) if "" in written else result
