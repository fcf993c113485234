"""The rows of the benchmarks as Markdown: everything in RESULTS.md, one line per workload in README.md.

    python -m tests.benchmarks.results FOLDER     # with pareto, predict, plantime and maxbatch.jsonl in it

Prints the targets and replaces what stands between the lines ``<!-- results:begin -->`` and ``<!-- results:end -->`` of
either file. Of a benchmark that has no file in the folder, the section and the targets stay as they are in RESULTS.md.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.benchmarks.maxbatch import CONTENDERS
from tests.benchmarks.plots import PLOTS
from tests.benchmarks.rows import (
    INFEASIBLE,
    MAXBATCH,
    PARETO,
    PLANTIME,
    PREDICT,
    BatchRow,
    ParetoRow,
    PlanRow,
    PredictRow,
    Row,
    read,
)
from tests.benchmarks.targets import Target, pareto_targets, prediction_targets

RESULTS = Path(__file__).with_name("RESULTS.md")
README = Path(__file__).resolve().parents[2] / "README.md"
_BLOCK = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)
_HOW = (
    "Each cell is the peak and the step time against eager. Percentages are shares of eager's activations; `block` is "
    "the model's own block checkpointing, `ours block` our plan for the same peak."
)
_SHORT = ["eager", "block", "ours block", "ours 50%", "ours 27%", "ours min", "compile", "ours+compile min"]


def fill(text: str, block: str) -> str:
    """``text`` with ``block`` between the marks; raises ``ValueError`` when there is not exactly one such place."""
    filled, count = _BLOCK.subn(lambda match: f"{match[1]}{block}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"The text has {count} blocks between results:begin and results:end; it needs one.")
    return filled


def targets_table(targets: list[Target]) -> str:
    """One line per target."""
    return _table(["target", "result"], ([target.name, target.value] for target in targets))


def pareto_table(rows: list[ParetoRow]) -> str:
    """One line per workload and contender."""
    eager = _eager(rows)
    columns = ["workload", "contender", "budget", "predicted", "peak", "activations", "step", "quartiles", "time"]
    columns += ["segments", "ready after", "remark", "code"]
    return _table(columns, ([*_pareto_line(row, eager.get(row.workload)), _code(row, rows)] for row in rows))


def short_table(rows: list[ParetoRow]) -> str:
    """One line per workload, one column per contender: peak and step time against eager."""
    eager = _eager(rows)
    cells = {(row.workload, row.contender): _cell(row, eager.get(row.workload)) for row in rows}
    shown = [name for name in _SHORT if any(row.contender == name for row in rows)]
    names = {row.workload: _name(row) for row in rows}
    body = ([about, *(cells.get((name, contender), "") for contender in shown)] for name, about in names.items())
    return f"{_setting(rows)} {_HOW}\n\n{_table(['workload', *shown], body)}"


def predict_table(rows: list[PredictRow]) -> str:
    """One line per case."""
    columns = ["case", "predicted", "measured", "error", "reserved, predicted", "reserved", "error", "took", "remark"]
    columns.append("code")
    return _table(columns, ([*_predict_line(row), _code(row, rows)] for row in rows))


def plan_table(rows: list[PlanRow]) -> str:
    """One line per graph."""
    columns = ["graph", "nodes", "captured after", "planned after", "remark", "code"]
    figures = ([r.workload, _int(r.nodes), _s(r.capture_s), _s(r.plan_s), r.note, _code(r, rows)] for r in rows)
    return _table(columns, figures)


def batch_table(rows: list[BatchRow]) -> str:
    """One line per workload and budget, one column per contender: the largest batch, and samples per second at it."""
    shown = [contender for contender in CONTENDERS if any(row.contender == contender for row in rows)]
    lines: dict[tuple[str, int], dict[str, str]] = {}
    oldest: dict[tuple[str, int], BatchRow] = {}
    for row in sorted(rows, key=lambda row: (row.workload, row.budget)):
        untimed = str(row.batch) if row.ok else row.note
        cell = f"{row.batch}, {row.per_second:,.0f}/s" if row.per_second else untimed
        key = row.workload, row.budget
        lines.setdefault(key, {})[row.contender] = cell
        oldest[key] = min(oldest.get(key, row), row, key=lambda each: each.code)
    body = (
        [key[0], _gb(key[1]), *(of.get(c, "") for c in shown), _code(oldest[key], rows)] for key, of in lines.items()
    )
    return _table(["workload", "budget", *shown, "code"], body)


def report(folder: Path, before: str) -> tuple[str, str, list[Target]]:
    """The blocks for RESULTS.md, whose text is ``before``, and for README.md, and the targets."""
    pareto, predicted = read(folder / PARETO, ParetoRow), read(folder / PREDICT, PredictRow)
    planned, batches = read(folder / PLANTIME, PlanRow), read(folder / MAXBATCH, BatchRow)
    targets = [*prediction_targets(predicted), *(pareto_targets(pareto) if pareto else [])]
    pictures = [f"![{p.stem}]({PLOTS.name}/{p.name})" for p in sorted(PLOTS.glob("*.png"))]
    old = _sections(before)
    sections: list[tuple[str, Sequence[Row], str]] = [
        ("Targets", [], _updated(old.get("Targets", ""), targets_table(targets)) if targets else ""),
        ("Peak against step time", pareto, pareto_table(pareto) if pareto else ""),
        ("Plots", [], "\n".join(pictures)),
        ("Predicted peaks", predicted, predict_table(predicted) if predicted else ""),
        ("Time to plan", planned, plan_table(planned) if planned else ""),
        ("Largest batch", batches, batch_table(batches) if batches else ""),
    ]
    texts = []
    for title, rows, text in sections:
        body = "\n\n".join([_setting(rows), text]) if rows else text or old.get(title, "")
        if body:
            texts.append(f"## {title}\n\n{body}")
    return "\n\n".join(texts), short_table(pareto) if pareto else "", targets


def _sections(text: str) -> dict[str, str]:
    """What stands under each title between the marks."""
    block = _BLOCK.search(text)
    parts = re.split(r"^## (.+)\n", block[0].rpartition("<!--")[0], flags=re.MULTILINE)[1:] if block else []
    return {title: body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}


def _updated(old: str, new: str) -> str:
    """The lines of the table ``old`` whose first cell has no line in ``new``, then those of ``new`` below its head."""
    head, line, *body = new.splitlines()
    known = {each.split("|")[1] for each in body}
    kept = [each for each in old.splitlines()[2:] if each.split("|")[1] not in known]
    return "\n".join([head, line, *kept, *body])


def _code(row: Row, rows: Sequence[Row]) -> str:
    """The code that made the row; that of a row which is not by the newest in the table says so."""
    newest = max(each.code for each in rows)
    return row.code if row.code == newest else f"older: {row.code or 'not noted'}"


def _eager(rows: list[ParetoRow]) -> dict[str, ParetoRow]:
    return {row.workload: row for row in rows if row.contender == "eager" and row.ok}


def _pareto_line(row: ParetoRow, eager: ParetoRow | None) -> list[str]:
    quartiles = row.quartiles_ms
    return [
        _name(row),
        row.contender,
        _gb(row.budget),
        _gb(row.predicted),
        _gb(row.peak),
        _activations(row, eager),
        _ms(row.step_ms),
        f"{quartiles[0]:.1f} - {quartiles[1]:.1f} ms" if quartiles else "",
        _ratio(row, eager),
        _int(row.segments),
        _s(row.setup_s),
        _remark(row),
    ]


def _predict_line(row: PredictRow) -> list[str]:
    pairs = ((row.predicted, row.measured), (row.predicted_reserved, row.reserved))
    figures = [text for pair in pairs for text in (*map(_gb, pair), _error(*pair))]
    return [row.workload, *figures, _s(row.seconds), row.note]


def _error(predicted: int | None, measured: int | None) -> str:
    return f"{predicted / measured - 1:+.2%}" if predicted and measured else ""


def _activations(row: ParetoRow, eager: ParetoRow | None) -> str:
    if eager is None or not (row.peak and row.fixed and eager.peak and eager.fixed and eager.peak > eager.fixed):
        return ""
    return f"{(row.peak - row.fixed) / (eager.peak - eager.fixed):.0%}"


def _remark(row: ParetoRow) -> str:
    lowest = f", lowest {_gb(row.lowest)}" if row.lowest is not None else ""
    return (row.note + lowest).replace("|", "\\|")


def _cell(row: ParetoRow, eager: ParetoRow | None) -> str:
    if not row.ok:
        return row.note if row.note == INFEASIBLE else "failed"
    return f"{_gb(row.peak)}, {_ms(row.step_ms) if row is eager else _ratio(row, eager)}"


def _name(row: Row) -> str:
    return f"{row.workload}, batch {row.batch}{'' if row.amp == 'off' else f', {row.amp}'}"


def _gb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f} GB"


def _ms(time: float | None) -> str:
    return "" if time is None else f"{time:.1f} ms"


def _s(time: float | None) -> str:
    return "" if time is None else f"{time:.1f} s"


def _int(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _ratio(row: ParetoRow, eager: ParetoRow | None) -> str:
    return f"x{row.step_ms / eager.step_ms:.2f}" if eager and row.step_ms and eager.step_ms else ""


def _setting(rows: Sequence[Row]) -> str:
    about = {f"{row.device}, {', '.join(f'{k} {v}' for k, v in row.versions.items())}": None for row in rows}
    return f"Measured on {'; '.join(about)}. GB = 10^9 bytes."


def _table(columns: list[str], body: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *body))


def main() -> int:
    """Print the targets and fill both files."""
    parser = argparse.ArgumentParser(description="Rows of the benchmarks as tables in RESULTS.md and README.md.")
    parser.add_argument("folder", type=Path, help="where the rows are")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the targets, write nothing")
    options = parser.parse_args()
    full, short, targets = report(options.folder, RESULTS.read_text())
    for target in targets:
        print(f"{target.name}: {target.value}")
        for name, value in target.by.items():
            print(f"    {name}: {value:.4f}")
    for path, block in ((RESULTS, full), (README, short)):
        if block and not options.only_print:
            path.write_text(fill(path.read_text(), block))
    return 0


if __name__ == "__main__":
    sys.exit(main())
