"""Libraries that set themselves up while planning does something else.

cuDNN takes up to two seconds to load, and it may plan or compile for half a second more what it is first given of each
signature. Nobody waits for that as long as it happens in a thread of its own: operators hold no lock of Python's while
they run. What they take is measured afterwards, when nothing else runs.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Self

import torch


class SettingUp:
    """Each of the ``runs`` once, a thread for each list of them, from here on until ``wait`` returns.

    What PyTorch reserved for them is given back at the end of a ``with`` statement.
    """

    def __init__(self, *runs: Sequence[Callable[[], object]]) -> None:
        self._waited_for = False
        self._threads = [threading.Thread(target=self._all, args=(each,), daemon=True) for each in runs if each]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Return once none of it runs any more; what has not begun does not run."""
        self._waited_for = True
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()
        if self._threads:
            torch.cuda.empty_cache()

    def _all(self, runs: Sequence[Callable[[], object]]) -> None:
        for run in runs:
            if self._waited_for:
                return
            with contextlib.suppress(Exception):  # as whoever measures the operator is told
                run()
