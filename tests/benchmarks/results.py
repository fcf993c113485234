"""The rows of ``budgets.py`` as Markdown tables: every row in RESULTS.md, one line per workload in README.md.

    python -m tests.benchmarks.results rows.jsonl

Each table replaces what stands between the lines ``<!-- results:begin -->`` and ``<!-- results:end -->`` of its file.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

EAGER = "eager"
RESULTS = Path(__file__).with_name("RESULTS.md")
README = Path(__file__).resolve().parents[2] / "README.md"
_COLUMNS = ["workload", "budget", "bound", "predicted", "measured"]
_COLUMNS += ["of eager", "step", "time", "segments", "optimize", "verdict"]
_BLOCK = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One workload under one budget (``eager``: unchanged), sizes in bytes; None where there is no such figure.

    ``bound`` is the budget in bytes, ``lowest`` the lowest reachable peak when the budget is infeasible,
    ``optimize_s`` the seconds of the whole ``optimize`` call, its verification included.
    """

    workload: str
    budget: str
    batch_size: int
    amp: str
    device: str
    torch: str
    passed: bool
    verdict: str
    bound: int | None = None
    predicted: int | None = None
    measured: int | None = None
    step_ms: float | None = None
    segments: int | None = None
    optimize_s: float | None = None
    lowest: int | None = None


def read(path: Path) -> list[Row]:
    """The rows of a JSON-lines file, none if there is no file."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def fill(text: str, table: str) -> str:
    """``text`` with ``table`` in its marked block; raises ``ValueError`` when there is not exactly one block."""
    filled, count = _BLOCK.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"The text has {count} blocks between results:begin and results:end; it needs one.")
    return filled


def full_table(rows: list[Row]) -> str:
    """One line per row."""
    eager = _eager(rows)
    return _table(rows, _COLUMNS, [_full_line(row, eager.get(row.workload)) for row in rows])


def short_table(rows: list[Row]) -> str:
    """One line per workload, one column per budget: measured peak and step time against eager."""
    eager = _eager(rows)
    budgets = list(dict.fromkeys(row.budget for row in rows if row.bound is not None or row.budget == "min"))
    cells = {(row.workload, row.budget): _cell(row, eager.get(row.workload)) for row in rows}
    body = [
        [_name(row), f"{_gb(row.measured)}, {_ms(row)}", *(cells.get((name, budget), "") for budget in budgets)]
        for name, row in eager.items()
    ]
    return _table(rows, ["workload", EAGER, *budgets], body)


def _eager(rows: list[Row]) -> dict[str, Row]:
    return {row.workload: row for row in rows if row.budget == EAGER}


def _full_line(row: Row, eager: Row | None) -> list[str]:
    return [
        _name(row),
        row.budget,
        _gb(row.bound),
        _gb(row.predicted),
        _gb(row.measured),
        f"{row.measured / eager.measured:.0%}" if eager and row.measured and eager.measured else "",
        _ms(row),
        _ratio(row, eager),
        "" if row.segments is None else str(row.segments),
        "" if row.optimize_s is None else f"{row.optimize_s:.0f} s",
        row.verdict,
    ]


def _cell(row: Row, eager: Row | None) -> str:
    if row.lowest is not None:
        return row.verdict
    return f"{_gb(row.measured)}, {_ratio(row, eager)}" if row.passed else "failed"


def _name(row: Row) -> str:
    return f"{row.workload}, batch {row.batch_size}"


def _gb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f} GB"


def _ms(row: Row) -> str:
    return "" if row.step_ms is None else f"{row.step_ms:.1f} ms"


def _ratio(row: Row, eager: Row | None) -> str:
    return f"x{row.step_ms / eager.step_ms:.2f}" if eager and row.step_ms and eager.step_ms else ""


def _table(rows: list[Row], columns: list[str], body: list[list[str]]) -> str:
    settings = dict.fromkeys(f"{row.device}, torch {row.torch}" for row in rows)
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *body)]
    return "\n".join([f"Measured on {'; '.join(settings)}. GB = 10^9 bytes.", "", *lines])


def main() -> int:
    """Read the rows named on the command line and fill both files."""
    if len(sys.argv) != 2:
        print("usage: results.py ROWS.jsonl", file=sys.stderr)
        return 2
    rows = read(Path(sys.argv[1]))
    for path, table in ((RESULTS, full_table(rows)), (README, short_table(rows))):
        path.write_text(fill(path.read_text(), table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
