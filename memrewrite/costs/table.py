"""Measured times by signature, kept for the process and, in a file of the user's cache folder, for later ones.

The file is a convenience: one that cannot be read, or is not what was written here, counts as empty and is replaced.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple
from pathlib import Path

import torch

from memrewrite.costs import Times

_VERSION = 1  # of the file and of what the figures in it mean
_PATIENCE_S = 60.0  # with another process that measures


def environment(device: torch.device) -> str:
    """What times hold for besides a signature: the CUDA device's name, PyTorch's version, the settings of libraries."""
    settings = (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return f"{name}, torch {torch.__version__}, {' '.join(map(str, settings))}"


def cache_file(environment: str) -> Path:
    """Where the times of an environment are kept, in the user's folder for caches."""
    from platformdirs import user_cache_path  # not every run needs it

    name = re.sub(r"[^a-z0-9.]+", "-", environment.partition(",")[0].lower())
    digest = hashlib.sha256(environment.encode()).hexdigest()[:12]
    return user_cache_path("memrewrite", appauthor=False) / f"times-{name}-{digest}.json"


class Table:
    """``known`` times by signature, None for one that could not be timed; filled from ``file`` at first."""

    def __init__(self, environment: str, file: Path | None) -> None:
        self._environment, self._file = environment, file
        self.known: dict[str, Times | None] = dict(self._read())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for other processes that measure, and know what they measured; meanwhile they wait for this one."""
        from filelock import FileLock, Timeout

        with ExitStack() as stack:
            if self._file is not None:
                with suppress(OSError, Timeout):  # side by side with them, then
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(f"{self._file}.lock", timeout=_PATIENCE_S))
                self.known.update({**self._read(), **self.known})
            yield

    def save(self, texts: set[str]) -> None:
        """Add the times of these signatures to the file, where it can be written."""
        lasting = {text: times for text in texts if (times := self.known.get(text)) is not None}
        if self._file is None or not lasting:
            return
        merged = {**self._read(), **lasting}  # read again, because other processes write it, too
        content = {
            "version": _VERSION,
            "environment": self._environment,
            "times": {text: astuple(each) for text, each in merged.items()},
        }
        try:
            _write(self._file, json.dumps(content))
        except OSError:
            return  # no room or no right to write there: the times are measured again another day

    def _read(self) -> Mapping[str, Times]:
        if self._file is None:
            return {}
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if (content["version"], content["environment"]) != (_VERSION, self._environment):
                return {}
            times = {str(text): Times(*map(float, each)) for text, each in content["times"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}
        sound = all(math.isfinite(ms) and ms >= 0 for each in times.values() for ms in astuple(each))
        return times if sound else {}


def _write(file: Path, text: str) -> None:
    """Replace the file as a whole, so that nobody reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
