"""Where the frames of Python's functions lie, and what those that an error has ended still hold.

CPython keeps them in chunks of 16 KiB. A frame that does not fit into the rest of one gets the next, which goes back
to the system as that function returns: where a chunk happens to end, each turn of a loop that calls a function maps
memory, faults and unmaps it again. Far down in Dynamo's frames that was half of what it took to divide a graph. A frame
larger than a chunk gets one twice its size or less, so one for it alone with room for others (``push_chunk`` in
CPython's Python/pystate.c, 3.11 to 3.14).
"""

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_WORDS = (1 << 16) + 1  # of eight bytes: of the chunk of 1 MiB that this takes nearly half is left


def in_one_chunk(function: Callable[P, T]) -> Callable[P, T]:
    """The function, of which the frames of some thousand calls within each other lie in one chunk."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = _called(function, args, kwargs)
        return result

    return run


def _called(function: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
    return function(*args, **kwargs)


_called.__code__ = _called.__code__.replace(co_stacksize=_WORDS)


def let_go(error: BaseException) -> None:
    """Have the frames that an error, and those it came of, went through hold nothing while it is handled.

    What tells autograd how to save tensors is on there until such a frame is gone: a call of
    ``torch.utils.checkpoint`` that fails would see what a run saves that is tried instead (PyTorch before 2.13).
    """
    each: BaseException | None = error
    while each is not None:  # not what was handled before: that is the caller's
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__
