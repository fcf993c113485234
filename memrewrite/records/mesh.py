"""The mesh a step runs on: how many processes train together, and what PyTorch's engine for that is told.

A mesh is written as text, ``ddp=8,gradient-as-bucket-view``: a number of processes and the arguments that
``DistributedDataParallel`` gets, by their own names; ``FLAGS`` has them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memrewrite.records.errors import UsageError

FLAGS = {
    "bucket-cap-mb": "the MiB of gradients that a bucket holds: bucket-cap-mb=50",
    "gradient-as-bucket-view": "gradients lie in the buckets",
    "static-graph": "the graph is the same in every step",
    "find-unused-parameters": "parameters without a gradient are looked for in every step",
    "no-buffers": "broadcast_buffers=False: buffers stay each process's own",
}
_DDP = re.compile(r"ddp=([1-9]\d{0,5})")
_CAP = re.compile(r"bucket-cap-mb=(\d{1,6}(?:\.\d+)?)")
_OTHERS = re.compile(r"(fsdp|tp|hsdp|pp|cp|ep)(=.*)?")


@dataclass(frozen=True)
class Mesh:
    """``ddp`` processes that train a copy of the model each; the rest are arguments of ``DistributedDataParallel``.

    ``bucket_cap_mb`` is in MiB, None for PyTorch's default. ``hook`` is a communication hook with its state, as
    ``register_comm_hook`` takes them, None for the default; text cannot say it. ``str`` writes what ``parse`` reads.
    """

    ddp: int
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    buffers: bool = True
    hook: tuple[Any, Callable[..., Any]] | None = None

    @classmethod
    def parse(cls, value: "str | Mesh") -> "Mesh":
        """Read a mesh; raises ``UsageError`` for one that means nothing or is not supported."""
        if isinstance(value, Mesh):
            return value
        first, *others = str(value).replace(" ", "").split(",")
        match = _DDP.fullmatch(first)
        if match is None:
            if _OTHERS.fullmatch(first):
                raise UsageError(f"The mesh {value!r} is not supported yet; ddp=8 is.")
            raise UsageError(f"The mesh {value!r} is unknown; write e.g. ddp=8 or ddp=8,gradient-as-bucket-view.")
        found = cls(int(match[1]))
        for word in others:
            found = found._with(word)
        return found

    def _with(self, word: str) -> "Mesh":
        if match := _CAP.fullmatch(word):
            return replace(self, bucket_cap_mb=float(match[1]))
        if word == "no-buffers":
            return replace(self, buffers=False)
        if word in ("gradient-as-bucket-view", "static-graph", "find-unused-parameters"):
            given: dict[str, Any] = {word.replace("-", "_"): True}
            return replace(self, **given)
        if _DDP.fullmatch(word) or _OTHERS.fullmatch(word):
            raise UsageError(f"A mesh of ddp and {word!r} is not supported yet; give ddp alone.")
        raise UsageError(f"{word!r} is unknown in a mesh; known are {', '.join(FLAGS)}.")

    def __str__(self) -> str:
        cap = "" if self.bucket_cap_mb is None else f"bucket-cap-mb={self.bucket_cap_mb:g}"
        words = (
            f"ddp={self.ddp}",
            cap,
            "gradient-as-bucket-view" if self.gradient_as_bucket_view else "",
            "static-graph" if self.static_graph else "",
            "find-unused-parameters" if self.find_unused_parameters else "",
            "" if self.buffers else "no-buffers",
        )
        return ",".join(filter(None, words))
