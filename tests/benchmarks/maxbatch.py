"""The largest batch that trains within 8, 16, 24 and 80 GB: eager, under block checkpointing, rewritten by memrewrite.

    python -m tests.benchmarks.maxbatch FOLDER [--only resnet50 gpt2_medium] [--budgets 8 16] [--deadline-s 540]

Every (workload, contender, budget) becomes a row of ``FOLDER/maxbatch.jsonl``; a stopped run resumes where it was. A
batch fits when the measured peak is within the budget. The search starts where the peak would be if it grew with the
batch, and ends when the next batch to try is less than an eighth larger than one that fits.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memrewrite.errors import BudgetInfeasibleError, MeasurementError
from tests.benchmarks.contenders import BLOCK, EAGER, OURS, prepare, rewritten
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import MAXBATCH, BatchRow, append, attempt, machine, read
from tests.benchmarks.trial import Trial, clear

CONTENDERS = [EAGER, BLOCK, OURS]
BUDGETS_GB = [8.0, 16.0, 24.0, 80.0]
_DEFAULT = ["resnet50", "efficientnet_b4", "vit_base", "gpt2_medium"]
_GRANULE = 8  # the batch found is within 1/8 of the largest
_STEPS = 5
_PROBE = 8  # the first batch tried, which says how the peak grows

Figures = dict[str, Any]


@dataclass
class Search:
    """The batches of one contender at one workload."""

    name: str
    contender: str
    device: torch.device
    tiny: bool = False
    probed: Figures | None = None

    def largest(self, budget: int) -> BatchRow:
        """The row of the largest batch within ``budget`` bytes."""
        tried: dict[int, Figures | None] = {}

        def fits(batch: int) -> bool:
            tried[batch] = self._trained(batch, budget)
            return tried[batch] is not None

        batch = largest(fits, self._guess(budget))
        figures = tried.get(batch) or {"note": "no batch fits"}
        return self.row(budget, batch, ok=batch > 0, trials=len(tried), **figures)

    def row(self, budget: int, batch: int = 0, **figures: Any) -> BatchRow:
        """A row of this contender."""
        workload = WORKLOADS[self.name]
        about: dict[str, Any] = {"amp": workload.amp, "optimizer": workload.optimizer, "contender": self.contender}
        return BatchRow(workload=self.name, batch=batch, budget=budget, **about, **machine(self.device), **figures)

    def _guess(self, budget: int) -> int:
        """The batch that would just fit if what a step takes beyond the fixed bytes grew with the batch."""
        if self.probed is None:
            self.probed = self._train(_PROBE, None)
        each = max(self.probed["peak"] - self.probed["fixed"], 1) / _PROBE
        return int((budget - self.probed["fixed"]) / each)

    def _trained(self, batch: int, budget: int) -> Figures | None:
        """The figures of a row, None where that batch does not fit."""
        try:
            trained = self._train(batch, budget)
        except (BudgetInfeasibleError, MeasurementError, torch.OutOfMemoryError):
            return None
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
            ready = rewritten(budget, step, model, inputs)
        else:
            ready = prepare(self.contender, workload, model, inputs, {})
        trial = Trial(ready.module, inputs, step, others)
        trial.warm_up()
        return trial.figures(_STEPS)


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """A batch that fits while one about an eighth larger does not; 0 where 1 does not fit.

    From the guess in doubling strides until the answer lies between two batches, then halfway between them.
    """
    low, high, stride, batch = 0, None, 1, max(guess, 1)
    while high is None or high - low > max(1, low // _GRANULE):
        if fits(batch):
            low = batch
        else:
            high = batch
        if low and high is not None:
            batch = (low + high) // 2
            continue
        away = stride * max(1, batch // _GRANULE)
        batch = max(1, batch + away if high is None else batch - away)
        stride *= 2
    return low


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    parser = argparse.ArgumentParser(description="The largest batches that fit a budget.")
    parser.add_argument("folder", type=Path, help="where maxbatch.jsonl is kept and resumed from")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=_DEFAULT, help="run these workloads only")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS_GB, help="in GB, 10^9 bytes")
    parser.add_argument(
        "--deadline-s", type=float, default=float("inf"), help="start no search after that many seconds"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    options = parser.parse_args()
    end, path = time.monotonic() + options.deadline_s, options.folder / MAXBATCH
    for name, contender in itertools.product(options.only, options.contenders):
        search = Search(name, contender, torch.device(options.device), options.tiny)
        for budget in (int(gigabytes * 1e9) for gigabytes in options.budgets):
            if time.monotonic() < end and (name, contender, budget) not in _done(path):
                append(path, _row(search, budget))
    return 0


def _row(search: Search, budget: int) -> BatchRow:
    return attempt(lambda: search.largest(budget), lambda why: search.row(budget, ok=False, note=why))


def _done(path: Path) -> set[tuple[str, str, int]]:
    return {(row.workload, row.contender, row.budget) for row in read(path, BatchRow)}


if __name__ == "__main__":
    sys.exit(main())
