"""Options of the test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--examples``: how many random models ``pytest -m fuzz`` tries."""
    parser.addoption("--examples", type=int, default=200, help="random models that `pytest -m fuzz` tries")
