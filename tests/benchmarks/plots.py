"""One PNG per workload of ``pareto.py``: peak against step time, a curve per contender.

python -m tests.benchmarks.plots FOLDER     # writes tests/benchmarks/plots/<workload>.png
"""

import argparse
from pathlib import Path

from tests.benchmarks.contenders import kind
from tests.benchmarks.rows import PARETO, ParetoRow, read

PLOTS = Path(__file__).with_name("plots")
_SIZE, _DPI = (8.0, 5.0), 130
_GB = 1e9

Curve = list[tuple[float, float, str]]
"""Peak in GB, step in ms, what the point is called."""


def curves(rows: list[ParetoRow]) -> dict[str, Curve]:
    """The points of each contender, by peak."""
    found: dict[str, Curve] = {}
    for row in rows:
        if row.ok and row.peak is not None and row.step_ms is not None:
            label = row.contender.removeprefix(kind(row.contender)).strip()
            found.setdefault(kind(row.contender), []).append((row.peak / _GB, row.step_ms, label))
    return {name: sorted(points) for name, points in found.items()}


def draw(workload: str, rows: list[ParetoRow], path: Path) -> None:
    """Write the picture of one workload's rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    for name, points in curves(rows).items():
        peaks, times, labels = zip(*points, strict=True)
        axes.plot(peaks, times, marker="o", markersize=5, linewidth=1.4, label=name)
        for peak, time, label in points if any(labels) else ():
            axes.annotate(label, (peak, time), textcoords="offset points", xytext=(3, 4), fontsize=7)
    about = rows[0]
    axes.set_title(f"{workload}, batch {about.batch}, {about.optimizer}, amp {about.amp}; {about.device}", fontsize=10)
    axes.set_xlabel("peak of a training step, GB")
    axes.set_ylabel("step, ms")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def draw_all(rows: list[ParetoRow], folder: Path) -> list[Path]:
    """A picture for each workload that has points; their paths."""
    paths = []
    for workload in dict.fromkeys(row.workload for row in rows):
        of = [row for row in rows if row.workload == workload]
        if curves(of):
            paths.append(folder / f"{workload}.png")
            draw(workload, of, paths[-1])
    return paths


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description="Plots of peak against step time.")
    parser.add_argument("folder", type=Path, help="where pareto.jsonl is")
    parser.add_argument("--out", type=Path, default=PLOTS)
    options = parser.parse_args()
    for path in draw_all(read(options.folder / PARETO, ParetoRow), options.out):
        print(path)


if __name__ == "__main__":
    main()
