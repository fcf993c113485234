"""One thread at a time changes what all threads see of PyTorch.

A patch that one thread puts in place and another one takes away in crossing order would stay, or go too early.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_PATCHING = threading.RLock()


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
