"""One call at a time in a process, whichever thread it comes from."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_TURN = threading.RLock()  # a call may make another


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which waits for calls of other threads of all that are made so.

    Each counts what lives, draws random numbers and puts PyTorch's and Python's settings back as they were, which all
    threads of a process share.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _TURN:
            return function(*args, **kwargs)

    return run
