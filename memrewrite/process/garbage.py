"""How often Python looks for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_SELDOM = 1000  # times that younger objects were looked through, before all are: by default Python does so after 10


@contextmanager
def sought_seldom() -> Iterator[None]:
    """Let Python look through all there is seldom meanwhile: much is made, little of it in cycles, and nothing large.

    With graphs of thousands of nodes and the libraries around, each look takes a third of a second. What is there
    already is not looked through at all: that is most of it.
    """
    before = gc.get_threshold()
    _BEFORE.append(before)
    gc.set_threshold(*before[:2], max(before[2], _SELDOM))
    aside = not _ASIDE and not _put_aside_by_others()  # who would get them back
    if aside:
        gc.freeze()
    _ASIDE.append(aside)
    try:
        yield
    finally:
        if _ASIDE.pop():
            gc.unfreeze()
        _BEFORE.pop()
        gc.set_threshold(*before)


@contextmanager
def not_sought() -> Iterator[None]:
    """Let Python not look for garbage meanwhile: for a search of which all that it makes is kept until it ends."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def sought_as_before() -> Iterator[None]:
    """Let Python look for garbage as often as before it was to do so seldom, where large things are made.

    What is there already is looked through once: libraries and plans are millions of objects, and a deep copy of a
    model makes enough new ones for Python to look through all of them. In a process of several it is not looked for at
    a moment of ours: what ends with groups of processes may wait for threads that wait for the interpreter's lock.
    """
    within = gc.get_threshold()
    if any(_ASIDE):
        gc.unfreeze()
        if not (dist.is_available() and dist.is_initialized()):
            gc.collect()
            gc.freeze()
    gc.set_threshold(*(_BEFORE[0] if _BEFORE else within))
    try:
        yield
    finally:
        gc.set_threshold(*within)


def _put_aside_by_others() -> bool:
    """Whether somebody else has put objects aside; counting them takes a tenth of a second, so once they are found."""
    if not _OTHERS and gc.get_freeze_count() > 0:
        _OTHERS.append(True)
    return bool(_OTHERS)


_BEFORE: list[tuple[int, int, int]] = []  # how often it did so outside of each scope
_ASIDE: list[bool] = []  # whether each of these scopes put aside what was there
_OTHERS: list[bool] = []  # not empty once somebody else was found to have put objects aside
