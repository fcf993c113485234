"""Calls in processes beside this one."""

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from memrewrite.process import beside
from memrewrite.process.beside import Beside


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it takes for one call beside this process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(beside, "_threads", functools.cache(beside._threads.__wrapped__))


TORCH_THERE = "'torch' in __import__('sys').modules"
PRINTED = "print('to no pipe') or 7"


@pytest.mark.parametrize(
    ("function", "args", "expected"), [(pow, (2, 10), 1024), (eval, (TORCH_THERE,), False), (eval, (PRINTED,), 7)]
)
def test_what_a_function_returns_comes_back(function: Callable[..., Any], args: Any, expected: object) -> None:
    assert Beside(function, *args).result() == expected


@pytest.mark.parametrize("ending", ["1 / 0", "__import__('os')._exit(3)", "exit(0)"])
def test_nothing_comes_back_of_what_does_not_run_through(ending: str) -> None:
    assert Beside(eval, ending).result() is None


def test_what_nobody_wants_any_more_ends() -> None:
    begun, calls = time.monotonic(), [Beside(time.sleep, 600) for _ in range(8)]  # more than begin at once
    time.sleep(0.5)
    for call in calls:
        call.drop()
    assert [call.result() for call in calls] == [None] * 8
    assert time.monotonic() - begun < 300


@pytest.mark.parametrize(("name", "value"), [("sched_getaffinity", lambda pid: {0}), ("cpu_count", lambda: 1)])
def test_with_one_cpu_nothing_is_started(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cpu_count":
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, name, value, raising=False)
    assert Beside(pow, 2, 10).result() is None


@pytest.mark.parametrize(("name", "value"), [("executable", "/opt/app/app"), ("frozen", True), ("executable", "")])
def test_where_no_python_can_be_started_nothing_is(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    assert Beside(pow, 2, 10).result() is None


def test_a_python_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Beside(pow, 2, 3).result() == 8
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert Beside(pow, 2, 3).result() is None
