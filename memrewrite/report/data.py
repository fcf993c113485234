"""The record of one ``optimize`` call: what was asked, done, refused, predicted, measured and proved."""

import os
from dataclasses import asdict, dataclass, field
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrewrite.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

SCHEMA_VERSION = 1
_KEY = "_memrewrite_report"


@dataclass(frozen=True)
class Peaks:
    """Where memory stood in one variant of the model; all in bytes, peaks over the second training step.

    ``phases`` holds (phase, bytes in use as the phase ends) for steps 1 and 2 in order; ``categories`` the bytes in use
    at the peak by kind (parameters, gradients, optimizer state, inputs, activations, temporaries, ...). ``reserved`` is
    what CUDA's caching allocator then holds of the device; on the CPU, which has none, the peak.
    """

    peak: int
    peak_step1: int
    phases: tuple[tuple[str, int], ...]
    categories: dict[str, int]
    reserved: int


@dataclass(frozen=True)
class Measured:
    """What really happened on the device: bytes allocated and reserved at the peak, median step time in ms.

    ``phases`` is as in ``Peaks``. ``device_used`` is what the whole CUDA device holds after the steps, for everybody on
    it: the CUDA context and the allocator's unused blocks count; None elsewhere.
    """

    peak: int
    reserved: int
    step_ms: float
    phases: tuple[tuple[str, int], ...]
    device: str
    device_used: int | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measured":
        """The inverse of ``dataclasses.asdict`` through JSON."""
        return cls(**{**data, "phases": tuple((name, size) for name, size in data["phases"])})


@dataclass(frozen=True)
class Segment:
    """One checkpoint segment: the nodes it covers, what it frees and what running it again costs.

    One of ``depth`` 2 lies inside one of depth 1, which frees the same bytes and more.
    """

    first: str
    last: str
    nodes: int
    saved_bytes: int
    rerun_ms: float
    depth: int = 1


@dataclass(frozen=True)
class Share:
    """A part of the model, by path ("" for what lies in no other part), and the bytes its forward keeps for backward.

    ``untouched`` says why the part stays as it is, "" where it is open to rewrites.
    """

    path: str
    kept_bytes: int
    untouched: str = ""


@dataclass(frozen=True)
class Curve:
    """Memory over the second step, as many of its moments as a drawing needs, its highest always among them.

    A moment is an operator that allocates, or the end of a phase; ``length`` is how many there were, ``moments`` the
    numbers of those that are kept, ``phases`` the phases in order, each with the number of its first moment. ``bytes``
    has, by category, the bytes in use at each moment kept. ``makers`` lists (module path, operator), ``made_by`` says
    which of them allocated at each moment kept; a module path of "" is the model itself, of None outside of it.
    """

    length: int
    phases: tuple[tuple[str, int], ...]
    moments: tuple[int, ...]
    bytes: dict[str, tuple[int, ...]]
    makers: tuple[tuple[str | None, str], ...]
    made_by: tuple[int, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes in use at each moment kept."""
        return tuple(map(sum, zip(*self.bytes.values(), strict=True)))

    @property
    def highest(self) -> int:
        """Which of the moments kept is the peak."""
        totals = self.totals
        return max(range(len(totals)), key=totals.__getitem__)


@dataclass(frozen=True)
class ModuleBytes:
    """The activations one submodule made that are there as forward ends (in inference: at the peak), in bytes.

    ``before`` in the model as it was, ``after`` in the rewritten one. A path of "" is the model itself, None outside.
    """

    path: str | None
    before: int
    after: int


@dataclass(frozen=True)
class Check:
    """What verification found in one group of values (all gradients, say) over all steps.

    ``bit_equal`` of its ``count`` values had the same bits. Of the others ``worst`` came nearest to, or went farthest
    beyond, what is ``allowed``: its ``error``, and the original's ``own_error``, as ``compare.TensorVerdict`` has them.
    A figure that is no number is None, and so are all three where every value is bit-equal.
    """

    group: str
    count: int
    bit_equal: int
    passed: bool
    worst: str = ""
    error: float | None = None
    own_error: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Option:
    """Another way to take the step: its predicted peak in bytes, whether that fits, and what it costs, in words."""

    name: str
    peak_bytes: int
    fits: bool
    cost: str


@dataclass(frozen=True)
class HabitCost:
    """What something that the loop keeps alive, in ``words``, adds to the predicted peak, in bytes."""

    words: str
    bytes: int


@dataclass(frozen=True)
class Report:
    """Everything a user is told. ``rewrites`` and ``refusals`` are (pass, where, what or why).

    ``freed`` has, by pass, the bytes that autograd keeps less for backward since its rewrites (segments not counted).
    ``checks`` is the verdict by group of values, empty where nothing was verified.
    ``command_line`` is the command line as it was typed, "" where Python asked.
    ``options`` is what else was tried for the model as it is, where that was asked for.
    ``habits`` is what the loop in ``config`` keeps alive and need not, for the rewritten model.
    ``shares`` splits a model that could not be captured whole; it is empty for one that was, and in inference.
    ``predicted_ms_before`` and ``predicted_ms_after`` are the step's time in ms as its operators' own times make it,
    None where these are not known (off CUDA, or where the model could not be captured whole).
    ``reserved`` says that ``budget`` is for what the allocator reserves, not for what is allocated.
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
    curve_before: Curve | None = None
    curve_after: Curve | None = None
    modules: tuple[ModuleBytes, ...] = ()
    command_line: str = ""
    options: tuple[Option, ...] = ()
    habits: tuple[HabitCost, ...] = ()
    reserved: bool = False

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

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``, as ``schema.json`` beside this file has it; carries ``schema_version``."""
        known = {"changed": self.changed, "captured_share": self.captured_share}
        return {"schema_version": SCHEMA_VERSION, **asdict(self), **known}

    def to_html(self) -> str:
        """One page of HTML that needs nothing else."""
        from memrewrite.report.page import to_html

        return to_html(self)

    def save(self, file: "str | os.PathLike[str]") -> None:
        """Write the report to ``file``, whole or not at all: a page (.html), a drawing (.png) or data (.json).

        Raises ``UsageError`` for another ending, where the file cannot be written, and for a drawing without matplotlib
        or of a report without curves.
        """
        from memrewrite.report.files import save

        save(self, Path(file))


def attach(module: "nn.Module", report: Report) -> None:
    """Let ``report_of(module)`` be ``report``, and ``module.report`` unless the model has an attribute of that name.

    A drop-in keeps it outside of its attributes.
    """
    from memrewrite.runtime.dropin import own

    tensors_and_modules = (vars(module)[kind] for kind in ("_parameters", "_buffers", "_modules"))
    theirs = getattr_static(module, "report", report)
    free = isinstance(theirs, Report) and not any("report" in named for named in tensors_and_modules)
    if (kept := own(module)) is not None:
        kept.carry(report, shown=free)
        return
    vars(module)[_KEY] = report
    if free:
        vars(module)["report"] = report


def report_of(module: "nn.Module") -> Report:
    """The report of what ``memrewrite.optimize`` returned, also where ``module.report`` is the model's own.

    Raises ``UsageError`` for any other module.
    """
    from memrewrite.runtime.dropin import own

    kept = own(module)
    report = vars(module).get(_KEY) if kept is None else kept.report
    if not isinstance(report, Report):
        raise UsageError(f"This {type(module).__name__} has no report; it is not what memrewrite.optimize returned.")
    return report
