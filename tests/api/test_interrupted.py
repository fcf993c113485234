"""Ctrl-C while planning: the best plan so far is offered, verified like any other; or nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

import memrewrite
from memrewrite import cli
from memrewrite.cache.store import Store
from memrewrite.commands import optimize
from memrewrite.commands.signals import Ended
from memrewrite.optimizing.remembered import run_remembering
from memrewrite.optimizing.request import Request
from memrewrite.optimizing.run import INTERRUPTED, Outcome
from memrewrite.search.candidate import Candidate
from memrewrite.workload.workload import workload
from tests.api.test_optimize import assert_untouched, state
from tests.support.models import ResidualNet

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def net() -> ResidualNet:
    torch.manual_seed(0)
    return ResidualNet()


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let Ctrl-C come as the plan of this number is simulated, the model without segments being the first."""

    def at(number: int) -> None:
        calls, rehearse = iter(range(1, 1000)), Candidate.rehearse

        def interrupted(candidate: Candidate, *args: Any) -> int:
            peak = rehearse(candidate, *args)
            if next(calls) == number:
                raise KeyboardInterrupt
            return peak

        monkeypatch.setattr(Candidate, "rehearse", interrupted)

    return at


def optimized(budget: str, offer: Callable[[int], bool], plans: Path) -> Outcome:
    work = workload(net(), IMAGES, None, "sgd", None, None, None)
    return run_remembering(work, Request(budget), Store(plans), lambda stage: None, offer)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_in_python_nothing_is_left(number: int, interrupted_at: Callable[[int], None], tmp_path: Path) -> None:
    model = net()
    before = state(model)
    interrupted_at(number)
    with pytest.raises(KeyboardInterrupt):
        memrewrite.optimize(model, IMAGES, optimizer="sgd", budget="min", cache=tmp_path)
    assert_untouched(before, model)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("budget", ["min", "80%"])
def test_the_best_plan_so_far_is_verified_and_not_kept(
    budget: str, interrupted_at: Callable[[int], None], tmp_path: Path
) -> None:
    offered: list[int] = []

    def taken(peak: int) -> bool:
        offered.append(peak)
        return True

    interrupted_at(3)
    outcome = optimized(budget, taken, tmp_path)
    report = outcome.report
    assert report.equivalent
    assert INTERRUPTED in report.notes
    assert report.segments
    assert report.predicted_after.peak <= offered[0] < report.predicted_before.peak
    assert budget == "min" or report.predicted_after.peak <= (report.budget or 0)
    assert os.listdir(tmp_path) == []


def test_a_plan_that_is_declined_is_dropped(interrupted_at: Callable[[int], None], tmp_path: Path) -> None:
    interrupted_at(3)
    with pytest.raises(KeyboardInterrupt):
        optimized("min", lambda peak: False, tmp_path)


def test_nothing_is_offered_where_nothing_fits(interrupted_at: Callable[[int], None], tmp_path: Path) -> None:
    interrupted_at(1)
    with pytest.raises(KeyboardInterrupt):
        optimized("min", lambda peak: pytest.fail("there is no plan yet"), tmp_path)


TARGET = """
import torch
from tests.support.models import ResidualNet

def get_model():
    return ResidualNet(depth={depth})

def get_inputs():
    return torch.randn(4, 3, 16, 16)
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Ended])
def test_nobody_is_asked_where_a_signal_ended_it(kind: type[KeyboardInterrupt]) -> None:
    stage: Any = SimpleNamespace(confirmed=lambda question: True)
    try:
        raise kind("SIGTERM")
    except kind:
        assert optimize._offered(1, stage) == (kind is KeyboardInterrupt)


@pytest.mark.parametrize("answer", [True, False, None], ids=["yes", "no", "Ctrl-C again"])
def test_the_terminal_is_asked(
    answer: bool | None,
    interrupted_at: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "net.py").write_text(TARGET.format(depth=3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    asked: list[str] = []

    def confirm(question: str, **how: Any) -> bool:
        asked.append(question)
        if answer is None:
            raise click.Abort
        return answer

    monkeypatch.setattr(click, "confirm", confirm)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    interrupted_at(3)
    monkeypatch.setattr(optimize, "verify_in_child", lambda *args, **how: "equivalent")  # of what was saved, as ever
    command = ["optimize", "net.py", "--budget", "min", "--device", "cpu", "--no-measure", "-o", "out", "-q"]
    assert cli.run(command) == (0 if answer else 130)
    out, err = capsys.readouterr()
    assert len(asked) == 1
    assert asked[0].endswith(" was found; verify and use it?")
    assert (tmp_path / "out").exists() == bool(answer)
    if answer:
        assert INTERRUPTED.split(";")[0] in out
    else:
        assert err.strip().splitlines()[-1].startswith("memrewrite: interrupted")
        assert out == ""


def test_ctrl_c_while_planning_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TARGET.format(depth=16))
    command = [sys.executable, "-m", "memrewrite", "optimize", "net.py", "--budget", "min", "--device", "cpu", "-v"]
    command += ["-o", "out", "--cache", "plans", "--json", "report.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        ended = next((line for line in process.stderr if line.startswith("rewrite:")), "")  # so that planning began
        time.sleep(0.25)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert ended
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "memrewrite: interrupted; nothing half-written is left."
    assert [line.partition(":")[0] for line in err.splitlines()[:-1]] == ["plan"]  # as -v tells
    assert out == ""
    assert os.listdir(tmp_path) == ["net.py"]
