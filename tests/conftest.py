"""Options of the test run."""

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CORE = (
    "passes",
    "test_capture.py",
    "test_compiled.py",
    "test_containers.py",
    "test_custom_functions.py",
    "test_effects.py",
    "test_examples.py",
    "test_grouped.py",
    "test_hazards.py",
    "test_known_values.py",
    "test_layers.py",
    "test_private.py",
    "test_regions.py",
    "test_segments.py",
    "test_simulate.py",
    "test_torch_versions.py",
)
"""Where a new PyTorch shows: what has to pass on every supported one, ``pytest -m core``."""
GOLDEN = Path(__file__).with_name("golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--examples``: how many random models ``pytest -m fuzz`` tries; ``--update-golden``: take texts as they are."""
    parser.addoption("--examples", type=int, default=200, help="random models that `pytest -m fuzz` tries")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew from what is printed now")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what belongs to ``CORE``."""
    for item in items:
        if item.path.is_relative_to(ROOT) and item.path.relative_to(ROOT).parts[0] in CORE:
            item.add_marker(pytest.mark.core)


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
