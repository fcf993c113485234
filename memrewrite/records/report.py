"""The record of one ``optimize`` call: what was asked, done, refused, predicted, measured and proved."""

import os
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from memrewrite.records.outcomes import (
    Check,
    Curve,
    HabitCost,
    Measured,
    ModuleBytes,
    Option,
    Peaks,
    PeaksBySize,
    Segment,
    Share,
)

SCHEMA_VERSION = 1
# What a report is shown and written by, named and not imported: all of it is made of what is here.
_PAGE, _FILES, _TABLES = "memrewrite.report.page", "memrewrite.report.files", "memrewrite.report.tables"


@dataclass(frozen=True)
class Report:
    """Everything a user is told; ``str()`` of it is for people.

    ``rewrites`` and ``refusals`` are (pass, where, what or why).
    ``freed`` has, by pass, the bytes that autograd keeps less for backward since its rewrites (segments not counted).
    ``checks`` is the verdict by group of values, empty where nothing was verified.
    ``command_line`` is the command line as it was typed, "" where Python asked.
    ``options`` is what else was tried for the model as it is, where that was asked for.
    ``habits`` is what the loop in ``config`` keeps alive and need not, for the rewritten model.
    ``shares`` splits a model that could not be captured whole; it is empty for one that was, and in inference.
    ``predicted_ms_before`` and ``predicted_ms_after`` are the step's time in ms as its operators' own times make it,
    None where these are not known (off CUDA, or where the model could not be captured whole).
    ``reserved`` says that ``budget`` is for what the allocator reserves, not for what is allocated.
    ``by_size`` is None where it was not computed, as it takes seconds, and where no size varies.
    """

    model: str
    mode: str
    device: str
    config: dict[str, Any]
    budget: int | None
    predicted_before: Peaks
    predicted_after: Peaks
    rewrites: tuple[tuple[str, str, str], ...] = ()
    refusals: tuple[tuple[str, str, str], ...] = ()
    freed: dict[str, int] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    equivalent: bool | None = None
    verdict: str = "not verified"
    measured_before: Measured | None = None
    measured_after: Measured | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] | None = None
    shares: tuple[Share, ...] = ()
    predicted_ms_before: float | None = None
    predicted_ms_after: float | None = None
    checks: tuple[Check, ...] = ()
    curve_before: Curve | None = field(default=None, repr=False)
    curve_after: Curve | None = field(default=None, repr=False)
    modules: tuple[ModuleBytes, ...] = ()
    command_line: str = ""
    options: tuple[Option, ...] = ()
    habits: tuple[HabitCost, ...] = ()
    reserved: bool = False
    by_size: PeaksBySize | None = None

    @property
    def held(self) -> int:
        """What the budget is held against, in bytes: measured where that was done, else predicted."""
        figures = self.measured_after or self.predicted_after
        return figures.reserved if self.reserved else figures.peak

    @property
    def captured_share(self) -> float:
        """Which part, between 0 and 1, of the activations that forward keeps was open to rewrites."""
        kept = sum(share.kept_bytes for share in self.shares)
        return sum(share.kept_bytes for share in self.shares if not share.untouched) / kept if kept else 1.0

    @property
    def freed_by_segments(self) -> int:
        """Bytes that are not kept for backward because of the segments, each counted once."""
        return sum(segment.saved_bytes for segment in self.segments if segment.depth == 1)

    @property
    def curves(self) -> dict[str, Curve]:
        """What there is to draw, by name: the original's and, where it is another, the rewritten model's."""
        known = {"original": self.curve_before, "rewritten": self.curve_after if self.changed else None}
        return {name: curve for name, curve in known.items() if curve is not None}

    @property
    def changed(self) -> bool:
        """Whether the result is another program than the model."""
        return bool(self.rewrites or self.segments) or self.predicted_after != self.predicted_before

    def __str__(self) -> str:
        text: str = import_module(_TABLES).text(self)
        return text

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``, as ``report/schema.json`` has it; carries ``schema_version``."""
        known = {"changed": self.changed, "captured_share": self.captured_share}
        return {"schema_version": SCHEMA_VERSION, **asdict(self), **known}

    def to_html(self) -> str:
        """One page of HTML that needs nothing else."""
        text: str = import_module(_PAGE).to_html(self)
        return text

    def save(self, file: "str | os.PathLike[str]") -> None:
        """Write the report to ``file``, whole or not at all: a page (.html), a drawing (.png) or data (.json).

        Page and drawing have the peaks ``by_size``, too, in the process that planned, as long as the result is there.
        Raises ``UsageError`` for another ending, where the file cannot be written, and for a drawing without matplotlib
        or of a report without curves.
        """
        import_module(_FILES).save(self, Path(file))
