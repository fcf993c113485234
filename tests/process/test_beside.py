"""Calls in processes beside this one."""

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memrewrite.process import beside
from memrewrite.process.beside import Beside, Crew, free_cpus


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it takes for one call beside this process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(beside, "_threads", functools.cache(beside._threads.__wrapped__))


TORCH_THERE = "'torch' in __import__('sys').modules"
PRINTED = "print('to no pipe') or __import__('os').write(1, b'nor this') and 7"


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


@pytest.fixture
def crew() -> Iterator[Crew]:
    found = Crew(2, gc.disable, {"SET_FOR_THEM": "yes"})
    yield found
    found.close()


def answers_of(crew: Crew, function: Callable[..., Any], jobs: list[tuple[Any, ...]]) -> list[Any]:
    return [future.result(60.0) for future in crew.asked(function, jobs)]


def test_a_crew_answers_each_job_and_again(crew: Crew) -> None:
    assert answers_of(crew, pow, [(n, 2) for n in range(9)]) == [n * n for n in range(9)]
    asked = "__import__('gc').isenabled()", "__import__('os').environ['SET_FOR_THEM']", PRINTED
    assert answers_of(crew, eval, [(text,) for text in asked]) == [False, "yes", 7]


def test_what_ends_a_process_of_a_crew_costs_its_own_job_alone(crew: Crew) -> None:
    assert answers_of(crew, eval, [("__import__('os')._exit(3)",)]) == [None]
    assert answers_of(crew, pow, [(2, n) for n in range(8)]) == [2**n for n in range(8)]  # by the other one


def test_jobs_that_have_not_begun_are_for_who_cancels_them(crew: Crew) -> None:
    assert answers_of(crew, pow, [(2, 2)] * 4) == [4] * 4  # both are prepared
    *waiting, first, second = crew.asked(time.sleep, [(0.0,)] * 3 + [(600,)] * 2)
    while not (first.running() and second.running()):
        time.sleep(0.01)
    assert [future.cancel() for future in waiting] == [True] * 3
    with pytest.raises(TimeoutError):
        first.result(0.1)
    crew.close()
    assert (first.result(60.0), second.result(60.0)) == (None, None)


def test_of_a_crew_that_is_closed_nothing_comes(crew: Crew) -> None:
    under_way = crew.asked(time.sleep, [(600,)] * 9)
    crew.close()
    assert all(future.cancelled() or future.result(60.0) is None for future in under_way)
    (later,) = crew.asked(pow, [(2, 10)])
    assert later.cancel()


def test_where_no_python_can_be_started_a_crew_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/no/python")
    (future,) = Crew(2, gc.disable, {}).asked(pow, [(2, 10)])
    assert future.cancel()


@pytest.mark.parametrize(("cpus", "free"), [({0}, 0), ({0, 1, 2, 3}, 3)])
def test_one_cpu_is_for_this_process(cpus: set[int], free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus, raising=False)
    assert free_cpus() == free
