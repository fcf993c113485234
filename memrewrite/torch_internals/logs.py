"""Log lines of PyTorch's own loggers, whose names are private, and what it prints. Read in PyTorch 2.11 to 2.15."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest import mock

from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.versions import require_module

require_module("torch.export._trace")
_LOGGERS = ("torch.export", "torch._export", "torch._dynamo", "torch._subclasses", "torch.fx", "torch.jit")


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the warnings and log lines of a front end: its failures become sentences of our own."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@process_wide
@contextmanager
def nothing_printed() -> Iterator[None]:
    """Keep export from printing the graph that it had when it failed, thousands of lines of it."""
    with mock.patch.object(import_module("torch.export._trace"), "print", mock.Mock(), create=True):
        yield


@contextmanager
def untold_failures() -> Iterator[None]:
    """Hold back PyTorch's own traceback of an operator that fails on fake tensors; the error itself is told."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
