"""What the benchmarks are held to, computed from their rows.

"Activations" are a peak without parameters, buffers, gradients, optimizer state and inputs. Where two contenders are
compared at one peak, ours is the fastest of our points that take no more memory.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from tests.benchmarks.contenders import BLOCK, BOTH, COMPILE, CONTENDERS, EAGER, OURS, kind
from tests.benchmarks.rows import INFEASIBLE, ParetoRow, PredictRow

SHARES = (0.50, 0.27)
ALIKE = 1.03  # times the step time


@dataclass(frozen=True)
class Target:
    """One figure in words; ``by`` has the figures it comes from, by workload or contender."""

    name: str
    value: str
    by: dict[str, float]


def pareto_targets(rows: list[ParetoRow]) -> list[Target]:
    """The targets of ``pareto.py``."""
    models = {name: [row for row in rows if row.workload == name] for name in dict.fromkeys(r.workload for r in rows)}
    targets = [within_budget(rows, OURS, "eager"), within_budget(rows, BOTH, "compiled by torch.compile")]
    lowest = {name: value for name, of in models.items() if (value := lowest_ratio(of)) is not None}
    targets.append(_means("lowest activation peak, ours / lowest of any peer", lowest))
    block = {name: value for name, of in models.items() if (value := at_block_peak(of)) is not None}
    targets.append(_means("step time at the peak of block checkpointing, ours / its", block))
    for share in SHARES:
        overhead = {name: value for name, of in models.items() if (value := at_share(of, share)) is not None}
        targets.append(_means(f"step time at {share:.0%} of eager's activations, ours / eager", overhead))
    points = {f"{name} {c}": value for name, of in models.items() for c, value in at_compiled(of).items()}
    compiled = {name: value for name, value in points.items() if value is not None}
    targets.append(_means("step time at the peak of activation_memory_budget, ours+compile / its", compiled))
    good = sum(value <= ALIKE for value in compiled.values())
    name = f"points of activation_memory_budget that ours+compile reaches in at most {ALIKE} times the time"
    targets.append(Target(name, f"{good} of {len(points)}", {}))
    lowest = {name: value for name, of in models.items() if (value := lowest_compiled(of)) is not None}
    return [*targets, _means("lowest activation peak compiled, ours / lowest of activation_memory_budget", lowest)]


def prediction_targets(rows: list[PredictRow]) -> list[Target]:
    """Median and worst share by which predicted bytes are off the measured ones, over the rows that have both."""
    peaks = {row.workload: (row.predicted, row.measured) for row in rows}
    reserved = {row.workload: (row.predicted_reserved, row.reserved) for row in rows}
    return [
        *_errors("error of the predicted peak", peaks),
        *_errors("error of what the allocator is predicted to reserve", reserved),
    ]


def _errors(name: str, figures: dict[str, tuple[int | None, int | None]]) -> Iterator[Target]:
    errors = {name: abs(predicted / real - 1) for name, (predicted, real) in figures.items() if predicted and real}
    if errors:
        worst = max(errors, key=lambda each: errors[each])
        median = statistics.median(errors.values())
        value = f"median {median:.2%}, worst {errors[worst]:.2%} ({worst}), {len(errors)} cases"
        yield Target(name, value, errors)


def within_budget(rows: list[ParetoRow], whose: str, how: str) -> Target:
    """How many rewritten models, of the contenders of that kind, stay within their budget in bytes; those over it.

    A budget that no plan meets is no row; one of a model that failed to train is not met.
    """
    budgeted = [row for row in rows if kind(row.contender) == whose and row.budget is not None]
    tried = [row for row in budgeted if row.note != INFEASIBLE]
    excess = {
        f"{row.workload} {row.contender}": row.peak / row.budget
        for row in tried
        if row.peak is not None and row.budget is not None
    }
    good = sum(share <= 1 for share in excess.values())
    over = {name: share for name, share in excess.items() if share > 1}
    worst = max(over, key=lambda name: over[name], default=None)
    value = f"{good} of {len(tried)} feasible rows"
    value += f", at worst {over[worst] - 1:.2%} over ({worst})" if worst else ", none over"
    return Target(f"measured peak within the budget, {how}", value, over)


def lowest_ratio(rows: list[ParetoRow]) -> float | None:
    """Our lowest activation peak over that of the best peer; None where one of them has no point."""
    return _lowest(rows, (OURS, BOTH), set(map(kind, CONTENDERS)) - {OURS, BOTH})


def lowest_compiled(rows: list[ParetoRow]) -> float | None:
    """``lowest_ratio`` of what is compiled only."""
    return _lowest(rows, (BOTH,), (COMPILE,))


def at_block_peak(rows: list[ParetoRow]) -> float | None:
    """Our step time over block checkpointing's, at its peak."""
    block = next((row for row in _measured(rows) if row.contender == BLOCK), None)
    return None if block is None else _ratio(rows, OURS, block.peak or 0, block)


def at_share(rows: list[ParetoRow], share: float) -> float | None:
    """Our step time over eager's, at a share of its activations."""
    eager = next((row for row in _measured(rows) if row.contender == EAGER), None)
    if eager is None:
        return None
    return _ratio(rows, OURS, (eager.fixed or 0) + share * _activations(eager), eager)


def at_compiled(rows: list[ParetoRow]) -> dict[str, float | None]:
    """Our compiled step time over torch.compile's, at the peak of each of its memory budgets; None where we need more.

    Empty where we have no compiled row.
    """
    if not any(kind(row.contender) == BOTH for row in _measured(rows)):
        return {}
    points = [row for row in _measured(rows) if kind(row.contender) == COMPILE and row.contender != COMPILE]
    return {row.contender: _ratio(rows, BOTH, row.peak or 0, row) for row in points}


def _measured(rows: Iterable[ParetoRow]) -> list[ParetoRow]:
    return [row for row in rows if row.ok and row.peak is not None and row.step_ms is not None]


def _lowest(rows: list[ParetoRow], ours: Collection[str], peers: Collection[str]) -> float | None:
    lowest = [
        min((_activations(row) for row in _measured(rows) if kind(row.contender) in kinds), default=None)
        for kinds in (ours, peers)
    ]
    return None if lowest[0] is None or not lowest[1] else lowest[0] / lowest[1]


def _activations(row: ParetoRow) -> int:
    return (row.peak or 0) - (row.fixed or 0)


def _ratio(rows: list[ParetoRow], ours: str, limit: float, other: ParetoRow) -> float | None:
    points = [row for row in _measured(rows) if kind(row.contender) == ours and (row.peak or 0) <= limit]
    return min(row.step_ms or 0 for row in points) / (other.step_ms or 0) if points else None


def _means(name: str, by: dict[str, float]) -> Target:
    """The geometric mean."""
    if not by:
        return Target(name, "no rows", by)
    mean = math.exp(statistics.fmean(math.log(max(value, 1e-9)) for value in by.values()))
    return Target(name, f"geometric mean x{mean:.3f} over {len(by)}, worst x{max(by.values()):.3f}", by)
