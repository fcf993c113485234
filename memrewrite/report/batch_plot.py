"""The measured peak against the batch size, original and rewritten, as a picture. Needs matplotlib, an extra."""

from collections.abc import Sequence
from pathlib import Path

from memrewrite.report.measured import Pair
from memrewrite.report.png import require
from memrewrite.report.text import plain
from memrewrite.report.writing import whole


def draw(pairs: Sequence[Pair], file: Path, title: str) -> None:
    """Write the picture to ``file``, whole or not at all; its suffix says the format.

    Raises ``UsageError`` without matplotlib and when the file cannot be written.
    """
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    unit, name = (10**9, "GB") if max(_peaks(pairs)) >= 10**9 else (10**6, "MB")
    for variant, marker in (("original", "o"), ("rewritten", "s")):
        points = [(p.batch_size, p.measured[variant].peak / unit) for p in pairs if variant in p.measured]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=variant)
    axes.set_title(plain(title).replace("$", r"\$"))  # a dollar would begin a formula
    axes.set_xlabel("batch size")
    axes.set_ylabel(f"measured peak of a step, {name} ({unit:.0e} bytes)".replace("e+0", "e"))
    axes.set_xticks(sorted({p.batch_size for p in pairs if p.batch_size is not None}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    with whole(file) as draft:
        figure.savefig(draft, format=file.suffix[1:], dpi=150)


def _peaks(pairs: Sequence[Pair]) -> list[int]:
    return [measured.peak for pair in pairs for measured in pair.measured.values()]
