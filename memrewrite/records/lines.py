"""Which line of the user's code is running, or raised, and whether a checkpoint runs it."""

import contextlib
import functools
import inspect
import os
import traceback

import torch
import torch.utils.checkpoint

_NOT_THE_USERS = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), contextlib.__file__


def line_now() -> str:
    """File and line of the user's code that is running, "" if there is none."""
    frame = inspect.currentframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(4096)
def _place(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def line_of(error: Exception) -> str:
    """The last line of the user's code that an error went through, "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file belongs neither to PyTorch nor to memrewrite, nor is what ``with`` statements go through."""
    return not file.startswith(_NOT_THE_USERS)


def in_checkpoint() -> bool:
    """Whether a ``torch.utils.checkpoint`` runs the code that asks."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
