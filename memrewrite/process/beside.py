"""Calls that run beside this process, each in a fresh one: for what takes seconds and needs nothing but plain values.

The function and its arguments go there pickled, and so does the result come back. What runs is no copy of this process,
whose CUDA context could not be forked, nor the script that was started here, as a pool of ``multiprocessing`` would run
once more. Where no process can be started, or one dies, the caller does the work itself.
"""

import contextlib
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from memrewrite.process.child import environment

T = TypeVar("T")


class Beside(Generic[T]):
    """``function(*args)`` in a process that begins as soon as a CPU is free for it."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._job = pickle.dumps((function, args))
        self._process: subprocess.Popen[bytes] | None = None
        self._dropped = False
        self._answer: Future[bytes] | None = None
        if (threads := _threads()) is not None:
            self._answer = threads.submit(self._run)

    def result(self) -> T | None:
        """What the function returned; None where it did not run through."""
        with contextlib.suppress(CancelledError):
            if self._answer is not None and (answer := self._answer.result()):
                found: T = pickle.loads(answer)  # noqa: S301  (of a process that was started here)
                return found
        return None

    def drop(self) -> None:
        """Nobody wants the result any more."""
        self._dropped = True
        if self._answer is not None and not self._answer.cancel() and self._process is not None:
            self._process.kill()

    def _run(self) -> bytes:
        command = [sys.executable, "-P", "-m", "memrewrite.process.beside"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:  # in a session of its own, as Ctrl-C is for this process
            self._process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
        except OSError:
            return b""
        if self._dropped:
            self._process.kill()
        answer, _ = self._process.communicate(self._job)
        return b"" if self._process.returncode else answer


@functools.cache
def _threads() -> ThreadPoolExecutor | None:
    """As many as there are CPUs besides the one this process works on; None without, or without a Python to start."""
    free = len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) - 1
    frozen = getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python")
    return None if frozen or free < 1 else ThreadPoolExecutor(free, thread_name_prefix="memrewrite-beside")


def _serve() -> None:
    """Do the one job on stdin, and answer on stdout, where nothing else is printed."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    function, args = pickle.load(sys.stdin.buffer)  # noqa: S301  (by the process that started this one)
    answers.write(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _serve()
