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
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
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
    """So many processes that call ``prepare``, a function of a module, and then do jobs until this is closed.

    ``settings`` are variables of their environment. Whatever becomes of a process, the caller can do the work itself.
    """

    def __init__(self, count: int, prepare: Callable[[], object], settings: dict[str, str]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._jobs: queue.LifoQueue[tuple[Future[Any], bytes] | None] = queue.LifoQueue()
        first = [prepare.__module__, prepare.__name__]
        command, place = [sys.executable, "-P", "-m", "memrewrite.process.beside", *first], environment() | settings
        with contextlib.suppress(OSError):
            for _ in range(count):
                process = subprocess.Popen(command, env=place, start_new_session=True, **_PIPES)
                self._processes.append(process)
                self._threads.append(threading.Thread(target=self._work, args=(process,), daemon=True))
                self._threads[-1].start()

    def asked(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]) -> "list[Future[T | None]]":
        """What will become of jobs, of which the last are done first; None of one that does not run through.

        One that has not begun can be cancelled, and done by the caller.
        """
        futures: list[Future[T | None]] = [Future() for _ in jobs]
        for future, job in zip(futures, jobs, strict=True):
            self._jobs.put((future, pickle.dumps((function, job))))
        return futures

    def close(self) -> None:
        """End the processes: nothing comes of the jobs that they do, nor of those that have not begun."""
        for process in self._processes:
            process.kill()
        with contextlib.suppress(queue.Empty):
            while (left := self._jobs.get_nowait()) is not None:
                left[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.join()
            with contextlib.suppress(OSError), process:  # whose pipes are closed
                pass
        self._processes, self._threads = [], []

    def _work(self, process: "subprocess.Popen[bytes]") -> None:
        """Have a process do one job after the other, from when it is prepared until it or the crew ends."""
        to, of = process.stdin, process.stdout
        future: Future[Any] | None = None
        try:
            while to is not None and of is not None:
                answer = pickle.load(of)  # noqa: S301  (of a process that was started here)
                if future is not None:
                    future.set_result(answer)
                while (taken := self._jobs.get()) is not None:
                    future, job = taken
                    if future.set_running_or_notify_cancel():
                        break
                else:
                    return
                to.write(job)
                to.flush()
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):  # it is gone
            if future is not None and future.running():
                future.set_result(None)


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
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # also for compilers that print past Python
    sys.stdout = sys.stderr
    if sys.argv[1:]:
        module, function = sys.argv[1:]
        answers.write(pickle.dumps(getattr(importlib.import_module(module), function)()))
        answers.flush()
    with contextlib.suppress(EOFError):
        while True:
            function, args = pickle.load(sys.stdin.buffer)  # noqa: S301  (by the process that started this one)
            answers.write(pickle.dumps(function(*args)))
            answers.flush()


if __name__ == "__main__":
    _serve()
