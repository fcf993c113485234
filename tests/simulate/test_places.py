"""The generator's comment at the end of a line is read back as the path that it was made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memrewrite.simulate.memory.places import comment, path_in

PATHS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # what a file in UTF-8 can hold


@pytest.mark.parametrize("path", ["layer1.0.conv", "a b", "it's", 'say "so"', "# x", "\n", "''"])
def test_a_path_is_read_back(path: str) -> None:
    assert path_in(f"relu = aten.relu.default(x)  # {'no: '}1; x = None{comment(path)}") == path


@given(PATHS)
def test_any_path_is_read_back(path: str) -> None:
    line = f"y = f('  # a'){comment(path)}"
    assert "\n" not in line
    assert path_in(line) == path


def test_a_line_without_one_belongs_to_the_module_itself() -> None:
    assert comment("") == ""
    assert path_in("y = f(x)") == ""
