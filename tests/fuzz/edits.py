"""Random edits of a model that was optimized, each drawn from what that model has: numbers, lists, children, classes.

An edit is made on the drop-in and on an equal plain model alike, so it is written down by name: where, what, how.
"""

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from memrewrite import optimize
from memrewrite.records.errors import MemrewriteError
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.workload.step import Inputs, Step
from tests.fuzz.check import EXACT, Numbers, compare, take_step
from tests.fuzz.strategies import RandomNet

Edit = Callable[[nn.Module, int], None]


@dataclass(frozen=True)
class Change:
    """The edit ``kind`` of the ``module``-th submodule (counted round), with the choice ``k``."""

    kind: str
    module: int = 0
    k: int = 0


def _number(module: nn.Module, k: int) -> None:
    """Another value of a number, a switch or a tuple of numbers."""
    plain = [(n, v) for n, v in vars(module).items() if isinstance(v, bool | float | int | tuple) and n[0] != "_"]
    name, value = plain[k % len(plain)]
    if isinstance(value, tuple):
        vars(module)[name] = tuple(2 if part == 1 else 1 for part in value if isinstance(part, int)) or value
    else:
        vars(module)[name] = (not value) if isinstance(value, bool) else type(value)(value * 2 + 1)


def _child(module: nn.Module, k: int) -> None:
    names = list(module._modules)
    if names:
        module._modules[names[k % len(names)]] = (nn.ReLU(), nn.Tanh(), nn.SiLU())[k % 3]


def _more(module: nn.Module, k: int) -> None:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        module.append((nn.ReLU(), nn.Tanh())[k % 2])
    else:
        module.add_module("unheard_of", nn.Tanh())


def _fewer(module: nn.Module, k: int) -> None:
    if isinstance(module, nn.Sequential) and len(module) > 1:
        del module[k % len(module)]


def _forward(module: nn.Module, k: int) -> None:
    vars(module)["forward"] = (torch.tanh, torch.relu, torch.sigmoid)[k % 3]


def _kind(module: nn.Module, k: int) -> None:
    if not list(module.parameters()) and not list(module.children()):
        module.__class__ = (nn.Tanh, nn.Sigmoid, nn.Softsign)[k % 3]


def _hook(module: nn.Module, k: int) -> None:
    module.register_forward_hook(
        lambda module, args, output: output * 2 if isinstance(output, torch.Tensor) else output
    )


def _tensor(module: nn.Module, k: int) -> None:
    """Another parameter or buffer in the place of one."""
    for name, parameter in list(module._parameters.items())[k % 3 : k % 3 + 1]:
        if parameter is not None:
            module.register_parameter(name, nn.Parameter(parameter.detach() * 0.5))
    for name, buffer in list(module._buffers.items())[k % 3 : k % 3 + 1]:
        if buffer is not None:
            module._buffers[name] = buffer.clone()


def _none(module: nn.Module, k: int) -> None:
    if "bias" in module._parameters:
        module._parameters["bias"] = None


def _frozen(module: nn.Module, k: int) -> None:
    for parameter in itertools.islice(module.parameters(), 1 + k):
        if parameter.is_leaf:
            parameter.requires_grad_(not parameter.requires_grad)


def _dictionary(module: nn.Module, k: int) -> None:
    """Another dictionary of attributes, in which every other time a number is another one."""
    object.__setattr__(module, "__dict__", dict(vars(module)))
    if k % 2:
        _number(module, k // 2)


_WRITTEN = "has been modified by an inplace operation"
EDITS: dict[str, Edit] = {
    "number": _number,
    "child": _child,
    "more": _more,
    "fewer": _fewer,
    "forward": _forward,
    "kind": _kind,
    "hook": _hook,
    "tensor": _tensor,
    "none": _none,
    "frozen": _frozen,
    "dictionary": _dictionary,
    "mode": lambda module, k: vars(module).update(training=not module.training),
    "unread": lambda module, k: vars(module).update(unread=k),
}


def changes() -> st.SearchStrategy[list[Change]]:
    """One to three edits."""
    one = st.builds(Change, st.sampled_from(sorted(EDITS)), st.integers(0, 40), st.integers(0, 11))
    return st.lists(one, min_size=1, max_size=3)


def apply(model: nn.Module, edits: list[Change]) -> None:
    """Make the edits, each on the module that its number means now; the model itself is edited as its parts are."""
    for edit in edits:
        inside = [m for name, m in model.named_modules() if name or edit.kind not in ("forward", "kind", "hook")]
        EDITS[edit.kind](inside[edit.module % len(inside)], edit.k)


def check_edited(model: RandomNet, inputs: Inputs, edits: list[Change], copied: str) -> str:
    """Optimize, edit, and compare a step with the plain model's, bit for bit; returns how it ended.

    ``copied`` says whether a copy is edited ("before"), the result copied once it is edited ("after"), or neither.
    Raises ``AssertionError`` where the two differ.
    """
    plain = copy.deepcopy(model)
    try:
        result: Any = optimize(model, inputs.args, budget="min", optimizer="none", passes=EXACT, verify=False)
    except (MemrewriteError, RuntimeError) as error:
        return type(error).__name__
    if result is model:
        return "nothing to rewrite"
    result = copy.deepcopy(result) if copied == "before" else result
    apply(plain, edits)
    apply(result, edits)
    result = copy.deepcopy(result) if copied == "after" else result
    expected = _numbers(plain, inputs)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", FallbackWarning)
        found = _numbers(result, inputs)
    if isinstance(expected, Exception):
        if _WRITTEN in str(expected) and not isinstance(found, Exception):
            return "the plain model alone fails"  # nothing is written in place in a program, which has right gradients
        assert isinstance(found, Exception), f"the plain model raises {expected!r}, and the other does not"
        return "both fail"
    assert not isinstance(found, Exception), f"raises {found!r}, and the plain model does not"
    compare(expected, found, 0.0)
    return "told" if any(w.category is FallbackWarning for w in seen) else "followed"


def _numbers(model: nn.Module, inputs: Inputs) -> Numbers | Exception:
    try:
        return take_step(model, inputs, Step("train" if model.training else "inference", None), 0)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return error
