"""What the default run leaves out is there to be left out, and is run all the same."""

import ast
from pathlib import Path

import pytest

from tests.support.slow import SLOW, is_slow

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("test", SLOW)
def test_it_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)].count(name) == 1
    assert SLOW[test]


def test_only_cases_that_are_named_are_slow() -> None:
    name = "plan/test_plan.py::test_fit_tells_the_truth_and_finds_what_it_saw"
    assert is_slow(f"{name}[waves-0.5]")
    assert not is_slow(f"{name}[waves-0.35]")
    name = "passes/test_composites.py::test_near_misses_are_left_alone"
    assert is_slow(f"{name}[minus-dynamo]")
    assert not is_slow(f"{name}[minus-export]")
    assert not is_slow(f"{name}[other slope-dynamo]")
    assert is_slow("benchmarks/test_pareto.py::test_rows_of_a_workload")
    assert not is_slow("benchmarks/test_pareto.py::test_bounds[ours min-None]")


def test_they_run_before_a_change_is_merged() -> None:
    assert "tests/run.sh -m slow\n" in (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")
