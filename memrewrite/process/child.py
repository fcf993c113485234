"""Runs a job in a fresh Python process, so that its crash or lack of memory cannot touch this one.

The job goes to ``memrewrite.commands.measure_child`` as one line of JSON on stdin, the answer comes back as the last
line of its stdout; whatever the model prints goes to stderr. Stdin stays open until the end: when this process dies,
however it dies, the child sees it close and ends too.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from memrewrite.records import errors
from memrewrite.records.errors import MeasurementError


def run_job(job: dict[str, Any], *, timeout_s: float) -> Any:
    """The answer to ``job`` (plain data with a ``kind``), from a fresh process that is gone when this returns.

    Raises what the child raised if it is one of memrewrite's errors, and ``MeasurementError`` when the child dies or
    does not answer within ``timeout_s`` seconds.
    """
    command = [sys.executable, "-P", "-m", "memrewrite.commands.measure_child"]
    # A session of its own, so that everything the model started can be ended with it.
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )
    with child:
        try:
            output = _talk(child, job, timeout_s)
        except subprocess.TimeoutExpired:
            raise MeasurementError(
                f"The measuring process gave no answer within {timeout_s:g} s and was ended; "
                "allow more time or use a smaller batch."
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return _answer(output, child.returncode)


class TargetFolder(str):
    """An entry of the import path for a target alone: a file in it may have the name of a module of Python's.

    A process that loads the target adds it once all else is imported.
    """

    __slots__ = ()


def environment() -> dict[str, str]:
    """This process's environment, with its import path, as the target's modules may come from anywhere on it."""
    entries = (entry or os.getcwd() for entry in sys.path if not isinstance(entry, TargetFolder))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


def _talk(child: "subprocess.Popen[str]", job: dict[str, Any], timeout_s: float) -> str:
    # communicate() would close stdin at once; the child takes that for the death of this process.
    lifeline, child.stdin = child.stdin, None
    if lifeline is None:
        raise MeasurementError("The measuring process has no standard input.")
    try:
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which its exit status tells
            lifeline.write(json.dumps(job) + "\n")
            lifeline.flush()
        return child.communicate(timeout=timeout_s)[0]
    finally:
        with contextlib.suppress(BrokenPipeError):
            lifeline.close()


def _answer(output: str, status: int) -> Any:
    last = next(iter(reversed(output.splitlines())), "")
    try:
        answer = json.loads(last)
    except ValueError:
        raise MeasurementError(_obituary(status)) from None
    if "error" in answer:
        kind, message = answer["error"]
        raise _known_error(kind)(message)
    return answer["ok"]


def _known_error(name: str) -> type[errors.MemrewriteError]:
    """The error of that name, if a sentence is all it takes."""
    kind = getattr(errors, name, MeasurementError)
    plain = issubclass(kind, errors.MemrewriteError) and kind.__init__ is errors.MemrewriteError.__init__
    return kind if plain else MeasurementError


def _obituary(status: int) -> str:
    if status == -signal.SIGKILL:
        return (
            "The measuring process was killed by SIGKILL, as the system does when the host runs out of memory; "
            "use a smaller batch or a host with more memory."
        )
    if status < 0:
        return f"The measuring process was killed by {signal.Signals(-status).name}; see its output for the cause."
    return f"The measuring process ended with status {status} and no answer; see its output for the cause."
