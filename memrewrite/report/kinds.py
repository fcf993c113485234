"""The kinds of memory that a drawing tells apart: what each gathers, and its colour on a light and a dark ground.

What stays through the step is blue, darkest at the bottom, what the step makes is orange, and what libraries take grey:
told apart without red and green, and neighbours by lightness too (``tests/report/test_curves.py`` holds them to it).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memrewrite.records.outcomes import Curve


@dataclass(frozen=True)
class Kind:
    """One colour of a drawing: the categories of bytes that it gathers; ``key`` is its name in styles."""

    key: str
    label: str
    categories: tuple[str, ...]
    light: str
    dark: str


KINDS = (  # from the bottom up
    Kind(
        "parameters",
        "parameters and buffers",
        ("parameters", "buffers", "average of the weights"),
        "#1d3f66",
        "#2f5f95",
    ),
    Kind("state", "optimizer state", ("optimizer state",), "#3f77b0", "#5a94cf"),
    Kind("gradients", "gradients", ("gradients", "communication buffers"), "#86b3dc", "#9cc4ea"),
    Kind("inputs", "inputs", ("inputs",), "#cfdfee", "#d9e6f3"),
    Kind("activations", "activations", ("activations",), "#f0962e", "#f2a144"),
    Kind("temporaries", "temporaries", ("temporaries",), "#b4450f", "#cd5c1f"),
    Kind(
        "workspaces",
        "workspaces",
        ("library workspaces", "operator workspace", "rests of blocks"),
        "#77705f",
        "#b9b19c",
    ),
)


def gathered(sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by ``Kind.key`` of bytes by category."""
    return {kind.key: sum(sizes.get(name, 0) for name in kind.categories) for kind in KINDS}


def layers(curve: "Curve") -> dict[str, Sequence[int]]:
    """Bytes at each moment of ``curve`` by ``Kind.key``, for the kinds that are there at all."""
    nothing = (0,) * len(curve.moments)
    found: dict[str, Sequence[int]] = {}
    for kind in KINDS:
        rows = [curve.bytes.get(name, nothing) for name in kind.categories]
        summed = tuple(map(sum, zip(*rows, strict=True)))
        if any(summed):
            found[kind.key] = summed
    return found
