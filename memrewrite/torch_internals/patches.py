"""One thread at a time changes what all threads see of PyTorch.

A patch that one thread puts in place and another one takes away in crossing order would stay, or go too early. A thread
that another one started and waits for is one with it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_FOR = threading.local()


def acting() -> int:
    """Whom this thread acts for: itself, or what ``acting_for`` says."""
    found: int = getattr(_FOR, "thread", None) or threading.get_ident()
    return found


@contextlib.contextmanager
def acting_for(thread: int) -> Iterator[None]:
    """Act for a thread, as ``acting`` named it there, which waits until this one is done."""
    _FOR.thread = thread
    try:
        yield
    finally:
        _FOR.thread = None


class _Patching:
    """A lock that is held once or more by all that acts for one thread."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._holder, self._depth = 0, 0

    def __enter__(self) -> None:
        mine = acting()
        with self._free:
            self._free.wait_for(lambda: not self._depth or self._holder == mine)
            self._holder, self._depth = mine, self._depth + 1

    def __exit__(self, *error: object) -> None:
        with self._free:
            self._depth -= 1
            self._free.notify_all()


_PATCHING = _Patching()


def process_wide(
    patch: Callable[P, contextlib.AbstractContextManager[T]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Let one thread at a time be inside of any patch that is decorated so; it may enter several."""

    @functools.wraps(patch)
    @contextlib.contextmanager
    def alone(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        with _PATCHING, patch(*args, **kwargs) as given:
            yield given

    return alone
