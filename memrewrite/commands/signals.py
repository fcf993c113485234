"""Signals that ask a command to end are taken as Ctrl-C is: nothing half-written is left. Imports no PyTorch."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from memrewrite.commands.launched import processes

# What schedulers, containers and ``timeout`` send, and a terminal that is closed.
_NAMES = ("SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """Such a signal, by its name, came: nobody is there to be asked what to do with what there is so far."""


def heed() -> None:
    """Raise ``Ended`` where one comes that would end this process, unless it is ignored.

    A launcher's processes wait for one another in code that no exception gets into, and end as they did.
    """
    if processes() > 1:
        return
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # one more ends the process as it is
        if os.getpid() != owner:  # a process that the model's code made of this one
            os.kill(os.getpid(), number)
        raise Ended(signal.Signals(number).name)

    for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let an interrupt, and what is taken as one, wait until the end."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGINT", *_NAMES) if hasattr(signal, name)]
        before = {each: handler for each in numbers if callable(handler := signal.getsignal(each))}
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
