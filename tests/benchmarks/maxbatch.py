"""The largest batch that trains within 8, 16, 24 and 80 GB: eager, its peers in ``pareto``, rewritten by memrewrite.

    python -m tests.benchmarks.maxbatch FOLDER [--only resnet50 gpt2_medium] [--budgets 8 16] [--deadline-s 540]

Every (workload, contender, budget) becomes a row of ``FOLDER/maxbatch.jsonl``; a stopped run resumes where it was. What
a contender does to a workload has a process of its own, as Liger changes classes for good. A
batch fits when the measured peak is within the budget. The search goes where the peak would be if it grew with the
batch as between batches seen before, those of other rows among them, and ends when a batch less than an eighth larger
than one that fits does not fit.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from memrewrite.records.errors import BudgetInfeasibleError, MeasurementError
from tests.benchmarks.contenders import BLOCK, CHUNKED, EAGER, LIGER, OURS, prepare, rewritten
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import MAXBATCH, BatchRow, append, attempt, machine, read
from tests.benchmarks.trial import Trial, clear

CONTENDERS = [EAGER, BLOCK, *LIGER, *CHUNKED, OURS]
BUDGETS_GB = [8.0, 16.0, 24.0, 80.0]
_DEFAULT = ["resnet50", "efficientnet_b4", "vit_base", "gpt2_medium"]
_GRANULE = 8  # the batch found is within 1/8 of the largest
_STEPS = 5
_PROBE = 8  # the first batch tried, which says how the peak grows

Figures = dict[str, Any]


@dataclass
class Search:
    """The batches of one contender at one workload. ``known`` are the bytes that a batch needs at least."""

    name: str
    contender: str
    device: torch.device
    tiny: bool = False
    known: dict[int, int] = field(default_factory=dict)

    def largest(self, budget: int) -> BatchRow:
        """The row of the largest batch within ``budget`` bytes."""
        tried: dict[int, Figures | None] = {}

        def fits(batch: int) -> bool:
            tried[batch] = self._trained(batch, budget)
            return tried[batch] is not None

        batch = largest(fits, lambda: self._guess(budget))
        figures = tried.get(batch) or {"note": "no batch fits"}
        return self.row(budget, batch, ok=batch > 0, trials=len(tried), **figures)

    def row(self, budget: int, batch: int = 0, **figures: Any) -> BatchRow:
        """A row of this contender."""
        workload = WORKLOADS[self.name]
        about: dict[str, Any] = {"amp": workload.amp, "optimizer": workload.optimizer, "contender": self.contender}
        return BatchRow(workload=self.name, batch=batch, budget=budget, **about, **machine(self.device), **figures)

    def _guess(self, budget: int) -> int:
        """The batch that would just fit if the peak grew evenly, at the pace from the smallest batch that is known to
        the one whose need is nearest to the budget."""
        if len(self.known) < 2:
            probed = self._train(_PROBE, None)
            self.known |= {0: probed["fixed"], _PROBE: probed["peak"]}
        small = min(self.known)
        near = min(self.known.keys() - {small}, key=lambda batch: abs(self.known[batch] - budget))
        pace = max(self.known[near] - self.known[small], 1) / (near - small)
        return int(near + (budget - self.known[near]) / pace)

    def _trained(self, batch: int, budget: int) -> Figures | None:
        """The figures of a row, None where that batch does not fit."""
        try:
            trained = self._train(batch, budget)
        except BudgetInfeasibleError as error:
            self.known[batch] = error.lowest
            return None
        except (MeasurementError, torch.OutOfMemoryError):
            return None
        if self.contender != OURS:  # which fills the budget
            self.known[batch] = trained["peak"]
        if trained["peak"] > budget:
            return None
        samples = batch * WORKLOADS[self.name].samples
        return {
            "peak": trained["peak"],
            "step_ms": trained["step_ms"],
            "per_second": samples / trained["step_ms"] * 1e3,
        }

    def _train(self, batch: int, budget: int | None) -> Figures:
        """Steady steps at a batch; ``budget`` None leaves ours at its lowest peak."""
        others = clear(self.device)
        workload = WORKLOADS[self.name]
        step = workload.step()
        torch.manual_seed(0)
        with self.device:
            model, inputs = workload.build(self.tiny), workload.inputs(batch, self.tiny)
        if self.contender == OURS:
            ready = rewritten(budget, step, model, inputs, returns=workload.returns)
        else:
            ready = prepare(self.contender, workload, model, inputs, {})
        trial = Trial(ready.module, inputs, step, others)
        trial.warm_up()
        return trial.figures(_STEPS)


def largest(fits: Callable[[int], bool], guess: Callable[[], int]) -> int:
    """A batch that fits while one about an eighth larger does not; 0 where 1 does not fit.

    ``guess`` is asked before each try. What it says is kept away from batches that were tried, in doubling strides: an
    eighth from the largest that fits, a sixteenth from the smallest that does not; between two, it is halfway.
    """
    low, high, up, down = 0, None, 1, 1
    while high is None or high - low > max(1, low // _GRANULE):
        batch = max(guess(), low + up * max(1, low // _GRANULE))
        if high is not None and (most := high - down * max(1, high // (2 * _GRANULE))) < batch:
            batch = (low + high) // 2 if low else max(most, 1)
        if fits(batch):
            low, up, down = batch, 2 * up, 1
        else:
            high, up, down = batch, 1, 2 * down
    return low


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    parser = argparse.ArgumentParser(description="The largest batches that fit a budget.")
    parser.add_argument("folder", type=Path, help="where maxbatch.jsonl is kept and resumed from")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=_DEFAULT, help="run these workloads only")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[EAGER, BLOCK, OURS])
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS_GB, help="in GB, 10^9 bytes")
    parser.add_argument(
        "--deadline-s", type=float, default=float("inf"), help="start no search after that many seconds"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    options = parser.parse_args()
    end = time.monotonic() + options.deadline_s
    for name, contender in itertools.product(options.only, options.contenders):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(_run, name, contender, options, end).result()
    return 0


def _run(name: str, contender: str, options: argparse.Namespace, end: float) -> None:
    """Add the rows of a contender that the file lacks."""
    path = options.folder / MAXBATCH
    search = Search(name, contender, torch.device(options.device), options.tiny, _known(path, name, contender))
    for budget in (int(gigabytes * 1e9) for gigabytes in options.budgets):
        if time.monotonic() < end and (name, contender, budget) not in _done(path):
            append(path, _row(search, budget))


def _row(search: Search, budget: int) -> BatchRow:
    return attempt(lambda: search.largest(budget), lambda why: search.row(budget, ok=False, note=why))


def _known(path: Path, name: str, contender: str) -> dict[int, int]:
    """What a batch of a row needs is about the row's budget."""
    rows = [row for row in read(path, BatchRow) if (row.workload, row.contender) == (name, contender)]
    return {row.batch: row.budget for row in rows if row.ok}


def _done(path: Path) -> set[tuple[str, str, int]]:
    return {(row.workload, row.contender, row.budget) for row in read(path, BatchRow)}


if __name__ == "__main__":
    sys.exit(main())
