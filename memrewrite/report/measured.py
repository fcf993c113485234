"""What was measured, as text for a terminal of 80 columns: one batch size in full, or the peaks of several."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memrewrite.records.errors import DoesNotFitError, MemrewriteError, OtherInputsError
from memrewrite.records.options import format_bytes
from memrewrite.records.outcomes import Measured
from memrewrite.report.tables import change, ratio, table
from memrewrite.report.text import plain

STEPS = 2  # those whose phases are known
_UNITS = ((10**9, "GB (10^9 bytes)", 3), (10**6, "MB (10^6 bytes)", 1), (10**3, "KB (10^3 bytes)", 1))


@dataclass(frozen=True)
class Failure:
    """Why there is nothing measured: a step that does not fit, inputs a rewritten model is not for, or worse."""

    error: MemrewriteError

    def __str__(self) -> str:
        words = {DoesNotFitError: "does not fit", OtherInputsError: "other inputs"}
        return words.get(type(self.error), "failed")


Variant = Measured | Failure


@dataclass(frozen=True)
class Pair:
    """What was measured at one batch size (None: that of the target's own inputs); ``rewritten`` None if not asked."""

    batch_size: int | None
    original: Variant
    rewritten: Variant | None = None

    @property
    def variants(self) -> dict[str, Variant]:
        """What was asked for, by name."""
        both = {"original": self.original, "rewritten": self.rewritten}
        return {name: each for name, each in both.items() if each is not None}

    @property
    def measured(self) -> dict[str, Measured]:
        """What went well, by name."""
        return {name: each for name, each in self.variants.items() if isinstance(each, Measured)}

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; a failure is ``{"failed": sentence}``."""
        return {
            "batch_size": self.batch_size,
            **{
                name: asdict(each) if isinstance(each, Measured) else {"failed": str(each.error)}
                for name, each in self.variants.items()
            },
        }


def show(pairs: Sequence[Pair], title: str, console: Console, *, plot: Path | None = None) -> None:
    """Print one pair in full, or the peaks of several; then why what is missing failed."""
    devices = sorted({each.device for pair in pairs for each in pair.measured.values()})
    failures = (each for pair in pairs for each in pair.variants.values() if isinstance(each, Failure))
    parts: list[RenderableType] = [Text(plain(f"{title} on {', '.join(devices)}"), style="bold")]
    parts += [_phases(pairs[0]), Text(), _peaks(pairs[0])] if len(pairs) == 1 else [_sweep(pairs)]
    parts += [Text(plain(f"Note: {text}")) for text in dict.fromkeys(str(each.error) for each in failures)]
    parts += [] if plot is None else [Text(plain(f"Written: {plot}"))]
    console.print(Group(*parts), markup=False, highlight=False, emoji=False)


def _phases(pair: Pair) -> RenderableType:
    """The bytes in use as each phase ends, steps 1 and 2 of each variant side by side, in one unit."""
    known = pair.measured
    largest = max(each.peak for each in known.values())
    unit, name, digits = next((u for u in _UNITS if largest >= u[0]), _UNITS[-1])
    steps = [f"step {number}" for number in range(1, STEPS + 1)]
    heads = [f"{variant} {step}" for variant in known for step in steps] if len(known) == 2 else steps
    rows = table("phase", *heads, numbers=True)
    half = min(len(each.phases) for each in known.values()) // STEPS
    columns = [each.phases[i : i + half] for each in known.values() for i in range(0, STEPS * half, half)]
    for cells in zip(*columns, strict=True):
        rows.add_row(cells[0][0], *(f"{size / unit:.{digits}f}" for _, size in cells))
    return Group(Text(f"In use as each phase ends, in {name}:"), rows)


def _peaks(pair: Pair) -> Table:
    variants = pair.variants
    compared = len(variants) == 2
    rows = table("", *([*variants, "change"] if compared else ["measured"]))
    for name, field, text, difference in _FIGURES:
        figures = [getattr(each, field, None) for each in variants.values()]
        if any(figure is not None for figure in figures):
            cells = [str(e) if f is None else text(f) for e, f in zip(variants.values(), figures, strict=True)]
            rows.add_row(name, *cells, *([difference(*figures)] if compared else []))
    return rows


def _sweep(pairs: Sequence[Pair]) -> Table:
    compared = len(pairs[0].variants) == 2
    rows = table("batch", *(["original", "rewritten", "change"] if compared else ["peak allocated"]), "step time")
    for pair in pairs:
        peaks = [getattr(each, "peak", None) for each in pair.variants.values()]
        times = [getattr(each, "step_ms", None) for each in pair.variants.values()]
        cells = [str(e) if p is None else format_bytes(p) for e, p in zip(pair.variants.values(), peaks, strict=True)]
        time = "" if times[-1] is None else f"{times[-1]:.1f} ms"
        extra, factor = ([change(*peaks)], ratio(*times)) if compared else ([], "")
        rows.add_row(str(pair.batch_size), *cells, *extra, f"{time} {factor}".strip())
    return rows


_FIGURES: tuple[tuple[str, str, Callable[[Any], str], Callable[..., str]], ...] = (
    ("peak allocated", "peak", format_bytes, change),
    ("peak reserved", "reserved", format_bytes, change),
    ("device in use", "device_used", format_bytes, change),
    ("step time", "step_ms", "{:.1f} ms".format, ratio),
)
