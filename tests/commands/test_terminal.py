"""What reaches a terminal, and what does not: colour, progress, quiet."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memrewrite.commands.progress import Stages
from tests.commands.test_show_command import folder

__all__ = ["folder"]
COLOUR = re.compile(r"\x1b\[[0-9;]*[34]\d[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, quiet: bool = False, verbose: bool = False
) -> str:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", stream)
    with Stages(quiet=quiet, verbose=verbose) as stage:
        stage("capture")
        stage("plan")
    return stream.getvalue()


def test_progress_on_a_terminal_names_stages_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = progress(monkeypatch, Terminal())
    assert re.search(r"plan .*0:00:00", text)
    assert COLOUR.search(text)


def test_progress_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = progress(monkeypatch, Terminal())
    assert "plan" in text
    assert not COLOUR.search(text)


@pytest.mark.parametrize(
    ("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True)], ids=["no terminal", "quiet"]
)
def test_no_progress(stream: io.StringIO, quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not re.search(r"capture|plan", progress(monkeypatch, stream, quiet=quiet))


def test_verbose_leaves_lines_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = progress(monkeypatch, io.StringIO(), verbose=True).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["capture", "plan"]


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What the command writes to a real terminal on stdout."""
    ours, theirs = pty.openpty()
    known = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "memrewrite", *arguments]
    try:
        done = subprocess.run(
            command, stdout=theirs, stderr=subprocess.PIPE, env={**known, "TERM": "xterm-256color", **environment}
        )
    finally:
        os.close(theirs)
    assert done.returncode == 0, done.stderr
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
    return text.decode()


def test_colour_on_a_terminal_alone(folder: Path) -> None:
    assert COLOUR.search(on_a_terminal("show", "out"))
    assert not COLOUR.search(on_a_terminal("show", "out", NO_COLOR="1"))
    piped = subprocess.run(
        [sys.executable, "-m", "memrewrite", "show", "out"], capture_output=True, text=True, check=True
    )
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) <= 80
