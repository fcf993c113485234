"""Every test that HAZARDS.md names exists."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (HERE / "HAZARDS.md").read_text(encoding="utf-8"))
ROWS = [
    line
    for line in (HERE / "HAZARDS.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| hazard")
]


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)))
def test_the_named_test_exists(file: str, test: str) -> None:
    functions = [node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert test in functions


def test_every_row_says_an_outcome_and_one_test() -> None:
    outcomes = r"(right|refused|opaque)"
    for row in ROWS:
        assert re.fullmatch(rf"\| .+ \| {outcomes}((, and|,| or) {outcomes})? \| `[\w/]+\.py::\w+` \|", row), row
    assert len(ROWS) == len(NAMED)
