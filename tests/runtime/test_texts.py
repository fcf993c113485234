"""Generated texts run as if compiled whole, and what they have in common is compiled once."""

import traceback
from types import CodeType
from typing import Any

import pytest

from memrewrite.runtime import texts
from memrewrite.runtime.texts import run_text

TEXT = '''"""Functions."""
def graph(self):
    return {value}


NAME = """
PROGRAM = no statement"""
PROGRAM = dict(
    run=graph,
    fails=lambda x: (
        x.missing
    ),
)
'''


def ran(text: str) -> Any:
    namespace: dict[str, Any] = {}
    run_text(text, namespace)
    return namespace["PROGRAM"]


@pytest.mark.parametrize("before", [0, 3], ids=["as-it-is", "further-down"])
def test_tracebacks_show_the_line(before: int) -> None:
    program = ran("\n" * before + TEXT.format(value=1))
    assert program["run"](None) == 1
    with pytest.raises(AttributeError) as caught:
        program["fails"](None)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.line, last.lineno) == ("x.missing", 11 + before)
    assert last.filename == program["run"].__code__.co_filename


def test_what_texts_have_in_common_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counted(text: str, file: str, mode: str) -> CodeType:
        compiled.append(text)
        return compile(text, file, mode)

    monkeypatch.setattr(texts, "compile", counted, raising=False)
    own = TEXT.replace("x.missing", "x.of_this_test")  # which no other test has run
    assert [ran(own.format(value=value))["run"](None) for value in (1, 2)] == [1, 2]
    assert sum("x.of_this_test" in text for text in compiled) == 1
