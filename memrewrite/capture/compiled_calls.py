"""Functions of ``torch.compile`` and TorchScript that a forward calls: a program runs them as they are written."""

from collections.abc import Iterator
from types import FunctionType

from torch import nn

from memrewrite.records.lines import is_users
from memrewrite.workload.held import named_beside


def told_of_compiled(model: nn.Module) -> tuple[str, ...]:
    """What to say of the functions that ``torch.compile`` made and the code or the attributes of the layers name."""
    names = ", ".join(dict.fromkeys(_compiled(model)))
    if not names:
        return ()
    return (
        f"What torch.compile made of {names} runs as it is written, whose last bits may be others, and in more memory "
        "than compiled: compile what optimize returns (compiled=True plans for that) in place of parts of the model.",
    )


def told_of_scripted(names: set[str]) -> tuple[str, ...]:
    """What to say of the functions that ``torch.jit.script`` made and that were called."""
    if not names:
        return ()
    return (f"What torch.jit.script made of {', '.join(sorted(names))} runs as it is written: last bits may differ.",)


def _compiled(model: nn.Module) -> Iterator[str]:
    attributes = (item for module in model.modules() for item in vars(module).items())
    for name, value in (*named_beside(model), *attributes):
        wraps = isinstance(value, FunctionType) and hasattr(value, "__wrapped__")
        if wraps and not is_users(value.__code__.co_filename):
            from memrewrite.torch_internals.compiling import backend_of  # which takes long

            if backend_of(value) is not None:
                yield name
