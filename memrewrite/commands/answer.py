"""How a command answers: printed on stdout, or as JSON there or in a file. Imports no PyTorch."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from memrewrite.commands.progress import Stages
from memrewrite.commands.requests import Request
from memrewrite.records.errors import OutputError
from memrewrite.records.report import SCHEMA_VERSION
from memrewrite.report.files import json_text
from memrewrite.report.printed import WIDTH
from memrewrite.report.writing import fill


@dataclass(frozen=True)
class Outcome:
    """What a command found: the JSON it answers, how to print it, and its exit code."""

    payload: dict[str, Any]
    show: Callable[[Console], None]
    code: int = 0


def respond(request: Request, work: Callable[[Stages], Outcome]) -> int:
    """Do the work, answer, and give the exit code; raises what the work raises."""
    out = sys.stdout
    with _apart(out), Stages(quiet=request.quiet, verbose=request.verbose) as stage:
        outcome = work(stage)
    return _answer(request, outcome, out)


@contextlib.contextmanager
def _apart(out: TextIO) -> Iterator[None]:
    """What the user's code prints does not mix with the result: it goes to stderr, also past Python's ``sys.stdout``.

    So do processes that it starts, such as compilers of extensions.
    """
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as after:
        if out is sys.__stdout__ and sys.__stderr__ is not None:
            out.flush()
            place = out.fileno()
            kept = os.dup(place)
            after.callback(os.close, kept)
            after.callback(os.dup2, kept, place)
            os.dup2(sys.__stderr__.fileno(), place)
            after.callback(out.flush)  # what was printed by sys.__stdout__
        yield


def _answer(request: Request, outcome: Outcome, out: TextIO) -> int:
    command = {"command": request.effective(), "exit_code": outcome.code}
    payload = {"schema_version": SCHEMA_VERSION, **outcome.payload, **command}
    text = json_text(payload)
    if request.json == "-":
        with standard_output(out):
            print(text, file=out, end="")
        return outcome.code
    if request.json is not None:
        fill(Path(request.json), text.encode())
    with standard_output(out):
        outcome.show(_Console(file=out, width=WIDTH))
    return outcome.code


class _Console(Console):
    """Ends with an error of the family where the reader is gone; rich itself would exit with the code 1."""

    def on_broken_pipe(self) -> None:
        raise OutputError("Standard output cannot be written: Broken pipe; the result is lost.")


@contextlib.contextmanager
def standard_output(out: TextIO) -> Iterator[None]:
    """Write to ``out`` what is written meanwhile, to its end; raises ``OutputError`` where it takes no more."""
    try:
        yield
        out.flush()
    except OSError as error:
        raise OutputError(f"Standard output cannot be written: {error.strerror}; the result is lost.") from error


def say(console: Console, text: str) -> None:
    """Print ``text``, which may hold foreign names, as it is."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
