"""Options of the test run."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slow import is_slow

ROOT = Path(__file__).parent
CORE = (
    "backends/",
    "passes/",
    "torch_internals/",
    "equivalence/test_in_mesh.py",
    "capture/test_capture.py",
    "runtime/test_compiled.py",
    "state/test_containers.py",
    "observe/test_effects.py",
    "project/test_examples.py",
    "capture/test_grouped.py",
    "capture/test_hazards.py",
    "capture/test_identity.py",
    "capture/test_opaque.py",
    "simulate/test_constant_values.py",
    "search/test_regions.py",
    "runtime/test_segments.py",
    "simulate/test_simulate.py",
)
"""Where a new PyTorch shows: what has to pass on every supported one, ``pytest -m core``, without what is slow."""
GOLDEN = Path(__file__).with_name("golden")
os.environ["MEMREWRITE_CACHE"] = "off"  # for every test and its children: plans are to be made, not found


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--examples``: how many random models ``pytest -m fuzz`` tries; ``--update-golden``: take texts as they are."""
    parser.addoption("--examples", type=int, default=200, help="random models that `pytest -m fuzz` tries")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew from what is printed now")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow (``tests/support/slow.py``), and what else belongs to ``CORE``."""
    for item in items:
        if not item.path.is_relative_to(ROOT) or any(map(item.get_closest_marker, ("zoo", "fuzz"))):
            continue
        file = item.path.relative_to(ROOT).as_posix()
        if is_slow(f"{file}::{item.name}"):
            item.add_marker(pytest.mark.slow)
        elif file.startswith(CORE):
            item.add_marker(pytest.mark.core)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector leave alone what was imported and collected, and look less often at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with ``tests/golden/NAME.txt``, but for blanks at the ends of lines."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / f"{name}.txt"
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        if request.config.getoption("--update-golden"):
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), "if that is right: python -m pytest --update-golden"

    return check
