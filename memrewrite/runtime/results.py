"""What a call of a drop-in gives, and what it leaves in attributes. Torch only; part of every artifact."""

from typing import Any

from torch import Tensor, nn

from memrewrite.runtime.matching import sizes_in


def result_of(program: Any, module: nn.Module, tensors: list[Tensor], numbers: list[tuple[str, float]]) -> Any:
    """What the program gives, once it has set what forward sets.

    Tensors that the last call left are let go of first: forward puts others in their places one by one.
    """
    for path, name in program.holds:
        setattr(module.get_submodule(path), name, None)
    result = program.run(module, *tensors, *(number for _, number in numbers))
    if program.holds:
        result, left = result
        for (path, name), value in zip(program.holds, left, strict=True):
            setattr(module.get_submodule(path), name, value)
    if program.sets is not None:
        for path, name, value in program.sets(**{**sizes_in(program, tensors), **dict(numbers)}):
            setattr(module.get_submodule(path), name, value)
    return result
