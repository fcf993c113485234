"""Fractions that vary in an export, as integers may: of these it knows, of those it makes constants.

Read in PyTorch 2.11 to 2.15.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.versions import private_imports, require_module

require_module("torch._export.non_strict_utils")  # whose import takes as long as all of memrewrite's


@process_wide
@contextlib.contextmanager
def fractions_vary(which: Iterable[bool]) -> Iterator[None]:
    """Let those of the fractions among the inputs of an export vary of which this is true, in their order."""
    with private_imports():
        from torch._export import non_strict_utils
        from torch._export.non_strict_utils import _is_constant_argument, fakify, key_path_to_source
        from torch.fx.experimental.symbolic_shapes import DimDynamic, TrackedFake

    varies = iter(which)

    def made(mode: Any, path: Any, value: Any, *given: Any, **named: Any) -> Any:
        if type(value) is not float or not next(varies):
            return fakify(mode, path, value, *given, **named)
        source = key_path_to_source(path, named.get("sourced_prefixes"))
        symbol = mode.shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        number = mode.shape_env.create_symfloatnode(symbol, hint=value, source=source)
        mode.shape_env.tracked_fakes.append(TrackedFake(number, source, None))
        return number

    def settled(value: Any) -> bool:
        return isinstance(value, torch.SymFloat) or _is_constant_argument(value)  # of which no sizes are to be checked

    with (
        mock.patch.object(non_strict_utils, "fakify", made),
        mock.patch.object(non_strict_utils, "_is_constant_argument", settled),
    ):
        yield


def of_sizes(value: Any) -> bool:
    """Whether a number that varies is one of sizes alone."""
    sources = value.node.shape_env.var_to_sources
    return all(".size()" in each.name for symbol in value.node.expr.free_symbols for each in sources.get(symbol, ()))


def is_open(value: Any) -> bool:
    """Whether an input is a number that tracing has not settled on one."""
    return isinstance(value, torch.SymInt | torch.SymFloat) and not value.node.expr.is_number
