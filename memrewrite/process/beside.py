"""Calls that run beside this process, each in a fresh one: for what takes seconds and needs nothing but plain values.

The function and its arguments go there pickled, and so does the result come back. What runs is no copy of this process,
whose CUDA context could not be forked, nor the script that was started here, as a pool of ``multiprocessing`` would run
once more. Where no process can be started, or one dies, the caller does the work itself.
"""

import contextlib
import functools
import importlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from memrewrite.process.child import environment

T = TypeVar("T")
_PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}


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
        try:  # in a session of its own, as Ctrl-C is for this process
            self._process = subprocess.Popen(command, env=environment(), start_new_session=True, **_PIPES)
        except OSError:
            return b""
        if self._dropped:
            self._process.kill()
        answer, _ = self._process.communicate(self._job)
        return b"" if self._process.returncode else answer


class Crew:
    """So many processes that wait for jobs, and call ``prepare``, a function of a module, before there are any.

    ``settings`` are variables of their environment. Whatever becomes of a process, the caller can do the work itself.
    """

    def __init__(self, count: int, prepare: Callable[[], object], settings: dict[str, str]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="memrewrite-crew")
        first = [prepare.__module__, prepare.__name__]
        command, place = [sys.executable, "-P", "-m", "memrewrite.process.beside", *first], environment() | settings
        with contextlib.suppress(OSError):
            for _ in range(count):
                self._processes.append(subprocess.Popen(command, env=place, start_new_session=True, **_PIPES))
                self._free.put(self._processes[-1])

    def results(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], seconds: float) -> list[T | None]:
        """What the function returned for each job; None where it did not run through, or not in time."""
        if not self._processes:
            return [None] * len(jobs)
        calls = [self._threads.submit(self._do, pickle.dumps((function, job))) for job in jobs]
        if wait(calls, timeout=seconds).not_done:
            self.close()
        return [call.result() for call in calls]

    def close(self) -> None:
        """End the processes; there are no answers any more."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        self._threads.shutdown()  # none waits any longer
        for process in processes:
            with contextlib.suppress(OSError), process:  # whose pipes are closed
                pass

    def _do(self, job: bytes) -> Any:
        process = self._free.get()
        try:
            if process.stdin is None or process.stdout is None:
                return None
            process.stdin.write(job)
            process.stdin.flush()
            return pickle.load(process.stdout)  # noqa: S301  (of a process that was started here)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):  # it is gone, and is for all others
            return None
        finally:
            self._free.put(process)


@functools.cache
def _threads() -> ThreadPoolExecutor | None:
    """As many as there are CPUs besides the one this process works on; None without, or without a Python to start."""
    free = free_cpus()
    return ThreadPoolExecutor(free, thread_name_prefix="memrewrite-beside") if free else None


def free_cpus() -> int:
    """How many there are for other processes; 0 without a Python to start."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    frozen = getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python")
    return 0 if frozen else cpus - 1


def _serve() -> None:
    """Do the jobs on stdin, and answer on stdout, where nothing else is printed; first call what is named, if it is."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    if sys.argv[1:]:
        module, function = sys.argv[1:]
        getattr(importlib.import_module(module), function)()
    with contextlib.suppress(EOFError):
        while True:
            function, args = pickle.load(sys.stdin.buffer)  # noqa: S301  (by the process that started this one)
            answers.write(pickle.dumps(function(*args)))
            answers.flush()


if __name__ == "__main__":
    _serve()
