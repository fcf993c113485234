"""The generator's comment at the end of a line is read back as the path that it was made of."""

import linecache
from types import CodeType
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memrewrite.simulate.memory.places import Places, comment, path_in

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


def test_the_line_of_an_instruction_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame:
        """Tells how often it is asked for its line, which takes as long as the code before it."""

        asked = 0

        def __init__(self, code: CodeType, instruction: int) -> None:
            self.f_code, self.f_lasti = code, instruction

        @property
        def f_lineno(self) -> int:
            Frame.asked += 1
            return self.f_lasti // 10

    monkeypatch.setattr(linecache, "getline", lambda file, line: f"y = f(x){comment(f'{file}.{line}')}\n")
    codes = [compile("0", name, "eval") for name in ("a", "b")]
    places, frames = Places(nn.Linear(1, 1)), [Frame(code, at) for code in codes for at in (10, 20, 21)]
    for _ in range(2):
        found = [places._named(cast(Any, frame)) for frame in frames]
        assert found == ["a.1", "a.2", "a.2", "b.1", "b.2", "b.2"]
    assert Frame.asked == len(frames)
