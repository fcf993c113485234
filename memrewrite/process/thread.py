"""Another thread of this process, where none of PyTorch's modes is on: neither autocast nor any that sees operators."""

import threading
from collections.abc import Callable
from typing import TypeVar

from memrewrite.torch_internals.patches import acting, acting_for

T = TypeVar("T")


def apart(run: Callable[[], T]) -> T:
    """What ``run`` gives in a thread of its own, which is waited for; raises what it raises."""
    found: list[T] = []
    errors: list[BaseException] = []
    caller = acting()

    def work() -> None:
        try:
            with acting_for(caller):
                found.append(run())
        except BaseException as error:  # handed on below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()  # held by nothing here: with its traceback it would keep all that the caller holds
    return found[0]
