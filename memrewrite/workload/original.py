"""The model that a rewritten one was made from, as long as only the rewritten one is there."""

from types import MethodType

from torch import nn

from memrewrite.runtime.dropin import base_of, graft, programs
from memrewrite.runtime.segment import OWN


def original_of(optimized: nn.Module) -> nn.Module:
    """The model that ``optimized`` was made from, sharing everything with it."""
    paths = programs(optimized)
    parts = {path: _base(optimized.get_submodule(path)) for path in paths if path}
    result = graft(optimized, parts) if parts else optimized
    return _base(result) if "" in paths else result


def _base(dropin: nn.Module) -> nn.Module:
    original: nn.Module = object.__new__(base_of(dropin))
    original.__dict__.update({name: value for name, value in vars(dropin).items() if name != "forward"})  # around ours
    replaced = vars(type(dropin))[OWN].replaced
    if replaced is not None:
        original.__dict__["forward"] = MethodType(replaced, original)
    return original
