"""The runtime's files stand in one, where a name means one thing."""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator

from memrewrite.artifact import render


def defined(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """The names that a statement at the top of a file gives, and what from."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name, "its own"
    elif isinstance(statement, ast.ImportFrom) and not str(statement.module).startswith("memrewrite"):
        yield from ((name.asname or name.name, str(statement.module)) for name in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        yield from ((name.id, "its own") for name in names if isinstance(name.ctx, ast.Store))


def test_no_two_files_of_the_runtime_mean_something_else_by_one_name() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for module in render._RUNTIME:
        for statement in ast.parse(inspect.getsource(module)).body:
            for name, origin in defined(statement):
                found[name].add(module.__name__ if origin == "its own" else origin)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
    assert "LazyOutput" in found
