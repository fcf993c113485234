"""The direction of imports, read from the source: from the rooms where a user comes in down to plain records."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

import memrewrite

ROOT = Path(memrewrite.__file__).parent

# From the top of the line to its bottom; a file imports only from its own room and from those below.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("backends", "integrations"),
    ("artifact", "estimates"),
    ("api",),
    ("optimizing",),
    ("cache",),
    ("report",),
    ("advice", "equivalence"),
    ("search",),
    ("passes",),
    ("measurement", "rewriting"),
    ("codegen", "plan_facts"),
    ("capture",),
    ("costs",),
    ("observe", "plan"),
    ("simulate",),
    ("workload",),
    ("targets",),
    ("process", "state"),
    ("torch_internals",),
    ("records",),
    ("runtime", "version"),
)
# Files that may name a pass: who lists them all, and who runs the ones that frame the others.
NAMES_PASSES = {"search.registry", "search.candidate", "search.inplace", "search.planning"}
# Files that stand in no room: where a user comes in.
AT_THE_TOP = {"", "__main__", "api", "cli", "version"}


def module_name(file: Path) -> str:
    """``plan.dp`` for ``memrewrite/plan/dp.py``, ``capture`` for ``memrewrite/capture/__init__.py``."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted({*ROOT.rglob("*.py"), *(ROOT / "passes").glob("*.py")})}


def imports(name: str, *, types: bool = False) -> set[str]:
    """The files of the project that a file imports; with ``types`` also those for type checking alone."""
    found: set[str] = set()
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    ours = {entry.removeprefix("memrewrite.") for entry in found if entry.startswith("memrewrite.")}
    return {entry for entry in ours if entry in FILES} - {name}


def room(name: str) -> int:
    """The number of the room a file belongs to, from the top; the longest match wins."""
    found = [(len(prefix), i) for i, room in enumerate(ROOMS) for prefix in room if f"{name}.".startswith(f"{prefix}.")]
    assert found, f"{name} belongs to no room: add it to ROOMS"
    return max(found)[1]


def test_every_room_is_there() -> None:
    named = {prefix for room in ROOMS for prefix in room}
    assert not {prefix for prefix in named if not any(f"{f}.".startswith(f"{prefix}.") for f in FILES)}


@pytest.mark.parametrize("name", [name for name in FILES if name])
def test_imports_lead_down(name: str) -> None:
    wrong = {other for other in imports(name) if other and room(other) < room(name)}
    assert wrong == set()


def test_files_stand_in_rooms() -> None:
    assert {name for name, file in FILES.items() if file.parent == ROOT} == AT_THE_TOP


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("runtime")])
def test_the_runtime_needs_torch_and_itself_alone(name: str) -> None:
    assert {other for other in imports(name, types=True) if not other.startswith("runtime")} == set()
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    assert packages(tree.body) <= {"torch", "memrewrite", *sys.stdlib_module_names}
    # Triton is no requirement: a function that finds it there may import it.
    assert packages(ast.walk(tree)) - packages(tree.body) <= {"triton"}


def packages(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that these nodes import."""
    statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    sources = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in statements]
    return {source.partition(".")[0] for source in sources}


def test_every_package_that_is_imported_is_asked_for() -> None:
    """What installing memrewrite brings is all that a run needs; the rest is named by an extra that a user asks for."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = {*project["dependencies"], *extras["plots"], *extras["lightning"], *extras["transformers"]}
    names = {re.split(r"[^\w-]", each)[0] for each in asked} | {"networkx", "sympy", "triton"}  # which come with torch
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in FILES.values()]
    found = set().union(*(packages(ast.walk(tree)) for tree in trees)) - sys.stdlib_module_names
    assert found - names <= {"memrewrite", "memrewrite_model"}  # the second is a user's own file


def test_only_the_registry_and_the_pipeline_name_a_pass() -> None:
    named = {name for name in FILES if any(other.startswith("passes.") for other in imports(name, types=True))}
    assert {name for name in named if not name.startswith("passes")} == NAMES_PASSES


def test_there_are_no_circles() -> None:
    graph = {name: {other for other in imports(name) if other} for name in FILES if name}
    while graph:
        free = {name for name, others in graph.items() if not others & graph.keys()}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {name: others for name, others in graph.items() if name not in free}


@pytest.mark.parametrize(
    "code",
    [
        "import memrewrite; memrewrite.Budget; memrewrite.UsageError",
        "import memrewrite.cli, memrewrite.commands.requests",
        "import memrewrite.cli; memrewrite.cli.run(['--help'])",
        "import memrewrite.records.report",
        "import memrewrite.records.options, memrewrite.records.errors",
    ],
    ids=["memrewrite", "cli", "help", "report", "options"],
)
def test_torch_is_not_imported_before_it_is_needed(code: str) -> None:
    check = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_what_takes_long_to_import_is_imported_where_it_is_used() -> None:
    """A package that not every run needs, and that PyTorch does not import by itself."""
    heavy = {
        "sympy",
        "mpmath",
        "networkx",
        "scipy",
        "rich",
        "jinja2",
        "matplotlib",
        "filelock",
        "click",
        "platformdirs",
    }
    heavy |= {"torch._dynamo", "torch._inductor", "torch.onnx", "transformers", "lightning"}
    code = "import memrewrite; [getattr(memrewrite, name) for name in memrewrite.__all__]"
    check = f"import sys, torch; before = {{*sys.modules}}; {code}; print(*{{*sys.modules}} - before & {heavy})"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_public_name_is_there() -> None:
    assert sorted(memrewrite.__all__) == memrewrite.__all__
    assert all(getattr(memrewrite, name) is not None for name in memrewrite.__all__)
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        memrewrite.optimise  # noqa: B018


def test_no_public_name_is_a_file() -> None:
    """Importing ``memrewrite.x`` makes the file the package's ``x``, whatever ``x`` was to be."""
    assert not {*memrewrite.__all__} & {name.partition(".")[0] for name in FILES}
