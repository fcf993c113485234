"""What the user asked for, parsed once at the edge and handed down frozen."""

import contextlib
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral
from typing import Protocol

from memrewrite.records.errors import UsageError

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_MOST = 2**63 - 1  # what sizes of memory can be


PASSES = (
    "swish",
    "composites",
    "tied_embeddings",
    "chunked_cross_entropy",
    "linear_cross_entropy",
    "tiles",
    "attention_in_pieces",
    "fused_chains",
    "checkpoint_segments",
    "inplace_activation",
)
"""The passes that can be asked for, as the registry knows them: named here to be checked before PyTorch is imported."""
SEEDS = range(-(2**63), 2**64)
"""What PyTorch's generators can be seeded with."""


def pass_names(asked: Iterable[str] | str | None) -> tuple[str, ...] | None:
    """The names of the passes that are asked for, with "all" also what runs on request only; None as ever.

    Raises ``UsageError`` for what is no list.
    """
    if not isinstance(asked, Iterable | None):
        raise UsageError(f"passes={asked!r} is no list of names; give passes=['swish'] say.")
    names = (asked,) if isinstance(asked, str) else None if asked is None else tuple(asked)
    return PASSES if names is not None and "all" in names else names


def check_passes(names: "tuple[str, ...] | None") -> None:
    """Raise ``UsageError`` for a name that is no pass."""
    for name in names or ():
        if name not in PASSES:
            raise UsageError(f"There is no pass {name!r}; the passes are {', '.join(PASSES)}, or all.")


def check_seed(seed: int) -> None:
    """Raise ``UsageError`` for a number that PyTorch's generators cannot be seeded with."""
    if not isinstance(seed, int) or seed not in SEEDS:  # a range compares all that it has with what is no int
        why = "is out of range" if isinstance(seed, int) else "is no int"
        raise UsageError(f"Seed {seed!r} {why}; give a whole number from -2**63 to 2**64 - 1.")


class Figures(Protocol):
    """What is known of a step: the peak of the bytes allocated, and of those the allocator reserved."""

    @property
    def peak(self) -> int:
        """Bytes that tensors and libraries had at most."""

    @property
    def reserved(self) -> int:
        """Bytes that the allocator held at most."""


@dataclass(frozen=True)
class Budget:
    """A bound on the real peak of a training step: bytes, a share of the original peak, or the lowest reachable.

    Exactly one of the first three fields is set (``minimum`` True counts as set). With ``reserved`` it bounds what the
    caching allocator of CUDA holds at most, which is what other processes, and a cap on this one, see of a step.
    """

    bytes: int | None = None
    share: float | None = None
    minimum: bool = False
    reserved: bool = False

    @classmethod
    def parse(cls, value: "str | int | Budget") -> "Budget":
        """Read ``8GB`` (10^9), ``8GiB`` (2^30), ``60%`` of the original peak, ``min``, or an int of bytes.

        Raises ``UsageError`` for anything else: bare numbers in text, ``Gb``, zero or less, more than 100 %.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, Integral) and not isinstance(value, bool):  # NumPy's, too
            return cls(bytes=_positive(int(value), str(value)))
        if not isinstance(value, str):
            raise UsageError(f"Budget {value!r} is not text, an int of bytes or a Budget; write e.g. '8GB'.")
        text = value.strip()
        if text == "min":
            return cls(minimum=True)
        if text.startswith("-"):
            raise UsageError(f"Budget {text!r} must be more than zero; write e.g. 8GB, 7.5GiB, 900MB, 60% or min.")
        if match := _PERCENT.fullmatch(text):
            percent = float(match[1])
            if not 0 < percent <= 100:
                raise UsageError(f"Budget {text!r} is not a share of the original peak; give more than 0% up to 100%.")
            return cls(share=percent / 100)
        match = _BYTES.fullmatch(text)
        if match is None or match[2] not in _UNITS:
            raise UsageError(f"Budget {text!r} has no known unit; write e.g. 8GB, 7.5GiB, 900MB, 60% or min.")
        return cls(bytes=_positive(int(Decimal(match[1]) * _UNITS[match[2]]), text))

    def of(self, figures: Figures) -> int:
        """What it bounds, in bytes, of the figures of a step."""
        return figures.reserved if self.reserved else figures.peak

    def resolve(self, original_peak: int) -> int | None:
        """The bound in bytes, given the original's peak in bytes; None means the lowest reachable."""
        if self.minimum:
            return None
        return self.bytes if self.bytes is not None else int((self.share or 1.0) * original_peak)

    def __str__(self) -> str:
        kind = "reserved" if self.reserved else "peak"
        if self.share is not None:
            return f"{100 * self.share:.4g}% of the original {kind}"
        return ("min" if self.minimum else format_bytes(self.bytes or 0)) + " reserved" * self.reserved


def device_bytes(memory: "str | int | Budget") -> int:
    """The bytes of a device that are given like a budget; raises ``UsageError`` for a share or ``min``."""
    with contextlib.suppress(UsageError):  # which would name what a device cannot have
        if (count := Budget.parse(memory).bytes) is not None:
            return count
    said = f"Device memory {reprlib.repr(memory)} is no number of bytes, or more than any device has"
    raise UsageError(f"{said}; write e.g. 8GB or 7.5GiB.")


def format_bytes(count: int, *, up: bool = False) -> str:
    """Both units, e.g. ``8.00 GB (7.45 GiB)``; small counts in MB or plain bytes.

    With ``up`` each is rounded up: as a budget it is enough for ``count``.
    """
    if count >= 10**9:
        return f"{_in(10**9, count, 2, up)} GB ({_in(2**30, count, 2, up)} GiB)"
    if count >= 10**6:
        return f"{_in(10**6, count, 1, up)} MB ({_in(2**20, count, 1, up)} MiB)"
    return f"{count} B"


def _in(unit: int, count: int, digits: int, up: bool) -> str:
    figure = -(-count * 10**digits // unit) / 10**digits if up else count / unit
    return f"{figure:.{digits}f}"


def short_bytes(count: int) -> str:
    """One unit, for columns: ``8.00 GB``."""
    return format_bytes(count).partition(" (")[0]


def _positive(count: int, text: str) -> int:
    if count <= 0:
        raise UsageError(f"Budget {text!r} must be more than zero bytes.")
    if count > _MOST:
        raise UsageError(f"Budget {reprlib.repr(text)} is more than any device has; write e.g. 8GB.")
    return count
