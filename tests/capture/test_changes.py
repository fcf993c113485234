"""Numbers that forward changes outside of the model: none of them is of a step, and whoever counts is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite

CALLS = 0
ASKED = False
STATISTICS: dict[str, Any] = {"calls": 0}
LENGTHS: list[int] = []
TABLE: dict[int, float] = {}


class Run:
    steps = 0
    scale = 1.0


RUN = Run()


def count(x: Tensor) -> None:
    global CALLS
    CALLS += 1


def count_in_a_dictionary(x: Tensor) -> None:
    STATISTICS["calls"] += 1


def keep(x: Tensor) -> None:
    LENGTHS.append(len(x))


def count_in_an_object(x: Tensor) -> None:
    RUN.steps += 1


def say_once(x: Tensor) -> None:
    global ASKED
    ASKED = True


def look_up(x: Tensor) -> None:
    TABLE.setdefault(len(x), len(x) ** 0.5)


def set_to_what_it_is(x: Tensor) -> None:
    RUN.scale = float(len(x) / len(x))


class Counting(nn.Module):
    def __init__(self, change: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layers, self.change = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))), change

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        result: Tensor = self.layers(x)
        return result


def notes(change: Callable[[Tensor], None]) -> tuple[str, ...]:
    result = memrewrite.optimize(Counting(change), torch.randn(64, 8), budget="min", verify=False)
    return memrewrite.report_of(result).notes


@pytest.mark.parametrize(
    ("change", "place"),
    [(count, "CALLS"), (count_in_a_dictionary, "STATISTICS"), (keep, "LENGTHS"), (count_in_an_object, "RUN")],
    ids=["a global", "a dictionary", "a list", "an object"],
)
def test_who_counts_in_forward_is_told_that_the_program_does_not(change: Callable[[Tensor], None], place: str) -> None:
    before = CALLS, dict(STATISTICS), [*LENGTHS], RUN.steps
    assert notes(change) == (
        f"Counting changes numbers each time forward runs (of {place}), which the program does not; count in the loop, "
        "or in a forward hook.",
    )
    assert (CALLS, STATISTICS, LENGTHS, RUN.steps) == before


@pytest.mark.parametrize("change", [say_once, look_up, set_to_what_it_is], ids=["a flag", "a table", "the same"])
def test_what_is_set_up_once_and_then_kept_is_no_counting(change: Callable[[Tensor], None]) -> None:
    assert notes(change) == ()
