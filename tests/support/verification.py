"""Models to verify, and which steps that takes."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from memrewrite.equivalence import case, judging
from memrewrite.equivalence.reference import double_step
from memrewrite.equivalence.trial import take_step


def rewrite(model: nn.Module, **methods: Callable[..., Any]) -> nn.Module:
    """An object of a subclass with these methods that shares everything with the model."""
    result: nn.Module = nn.Module.__new__(type("Rewritten", (type(model),), methods))
    vars(result).update({key: dict(v) if type(v) is dict else v for key, v in vars(model).items()})
    return result


def steps_taken(monkeypatch: pytest.MonkeyPatch, name: Callable[[nn.Module], str], reference: str) -> list[str]:
    """The steps that are taken from now on, by the ``name`` of each one's model; ``reference`` is one in float64."""
    taken: list[str] = []

    def step(module: nn.Module, *args: Any) -> Any:
        taken.append(name(module))
        return take_step(module, *args)

    def in_float64(*args: Any) -> Any:
        taken.append(reference)
        return double_step(*args)

    monkeypatch.setattr(case, "take_step", step)
    monkeypatch.setattr(judging, "double_step", in_float64)
    return taken
