"""The rows of the zoo as a Markdown table with its counts on top: ``tests/benchmarks/ZOO.md``."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.zoo.run import Row

TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "ZOO.md"
_COLUMNS = ["family", "model", "parameters", "front end", "regions", "before", "budget", "predicted", "tracked"]
_COLUMNS += ["segments", "recomputed", "seconds", "outcome"]
_INTRO = """# The zoo

Models that nobody here wrote, with random weights, through `memrewrite.optimize` with AdamW (torchvision's AlexNet and
VGG with SGD) at a budget of floor + 60 % of (peak - floor), where the floor is parameters, gradients, optimizer state
and inputs. Each ran in a fresh process on one CPU core (PyTorch {torch}): `python -m tests.zoo.run rows.jsonl`.
*Predicted* is the simulated peak of the result, *tracked* that of a real step under
`memrewrite.simulate.run_tracked`; *recomputed* is the share of the forward's estimated milliseconds that runs a second
time; *seconds* is the whole `optimize` call with its proof, by the clock, beside what else ran. Sizes in bytes.

| library | models | verified within the budget | refused by name | crashed | predicted = tracked |
|---|---|---|---|---|---|
{counts}
"""


def write(rows: "list[Row]") -> None:
    """Replace ``ZOO.md``."""
    libraries = list(dict.fromkeys(row.library for row in rows))
    counts = "\n".join(_count(name, [row for row in rows if row.library == name]) for name in libraries)
    versions = " and ".join(sorted({row.torch for row in rows}))
    text = [_INTRO.format(torch=versions, counts=counts)]
    for name in libraries:
        text += [f"## {name}\n", f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
        text += [_line(row) for row in sorted(rows, key=lambda row: row.family) if row.library == name]
        text.append("")
    TABLE.write_text("\n".join(text))


def _count(name: str, rows: "list[Row]") -> str:
    outcomes = Counter(row.outcome for row in rows)
    verified = [row for row in rows if row.outcome == "verified"]
    share = f"{outcomes['verified']} ({100 * outcomes['verified'] / len(rows):.1f} %)"
    exact = f"{sum(row.predicted == row.tracked for row in verified)} of {len(verified)}"
    return f"| {name} | {len(rows)} | {share} | {outcomes['refused']} | {outcomes['crashed']} | {exact} |"


def _line(row: "Row") -> str:
    sizes = [row.parameters, row.before, row.budget, row.predicted, row.tracked, row.segments]
    parameters, before, budget, predicted, tracked, segments = ("" if s is None else f"{s:,}" for s in sizes)
    overhead = "" if row.overhead is None else f"{100 * row.overhead:.0f} %"
    sentence = " ".join(row.sentence.split()).replace("|", "\\|")
    outcome = f"{row.outcome}: {sentence}" if sentence else f"{row.outcome}: {row.verdict}"
    cells = [row.family, row.name, parameters, row.front_end, str(row.regions), before, budget, predicted, tracked]
    return f"| {' | '.join([*cells, segments, overhead, f'{row.seconds:.0f}', outcome])} |"
