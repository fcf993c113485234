"""Progress on stderr: the stage that runs and the time it takes; nothing where nobody watches."""

import sys
import time
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Stages:
    """Names each stage as it begins.

    On a terminal the running stage is shown with its elapsed time; with ``verbose`` each finished stage leaves a line
    on stderr, terminal or not; with ``quiet``, and where stderr is no terminal, nothing is printed.
    """

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        hidden = quiet or not console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=hidden)
        self._verbose = verbose
        self._task: TaskID | None = None
        self._running: tuple[str, float] | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._progress.stop()

    def confirmed(self, question: str) -> bool:
        """The answer to a question, no where nobody is there to give one. Raises ``click.Abort`` for Ctrl-C."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        self._progress.stop()
        answer = click.confirm(question, err=True)
        self._progress.start()
        return answer

    def __call__(self, stage: str) -> None:
        """``stage`` begins; the one before has ended."""
        self._end()
        self._running = (stage, time.monotonic())
        self._task = self._progress.add_task(stage, total=None)

    def _end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        running, self._running = self._running, None  # first, as an interrupt may come while it is told
        if running is not None and self._verbose:
            stage, since = running
            click.echo(f"{stage}: {time.monotonic() - since:.1f} s", err=True)
