"""No function of the package is longer than fifty lines, no file than four hundred."""

import ast

import pytest

from tests.project.test_imports import FILES


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_can_be_read_at_once(name: str) -> None:
    text = FILES[name].read_text(encoding="utf-8")
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    long = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert [name for name, lines in long.items() if lines > 50] == []
    assert len(text.splitlines()) <= 400
