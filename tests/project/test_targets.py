"""Where a step runs is asked of its target, and chosen only where a user says it."""

import ast

import pytest

from tests.project.test_imports import FILES

# Where a user's word is read, and made a target.
EDGE = ("api", "cli", "commands", "estimates", "optimizing")
WORDS = {"as_cuda", "compiled"}
TARGETS = {"CUDA_FROM_CPU", "CudaFromCpu", "CompiledTarget"}


def words(name: str) -> set[str]:
    """The attributes, arguments and targets that a file names, of those that say where a step runs."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.alias | ast.ClassDef):
            found.add(node.name)
    return found & (WORDS | TARGETS)


# What measuring processes are told, and Dynamo's own result: no question of where a step runs.
OTHERS = {"measurement.measuring": {"compiled"}, "capture.dynamo": {"compiled"}}


@pytest.mark.parametrize("name", [name for name in FILES if name.partition(".")[0] not in (*EDGE, "targets")])
def test_nobody_else_asks_what_a_target_is(name: str) -> None:
    assert words(name) <= OTHERS.get(name, set())


def test_the_edge_and_the_targets_name_them() -> None:
    for name in ("optimizing.request", "commands.job", "targets.compiled", "targets.cuda_from_cpu"):
        assert words(name)
