"""The examples against budgets on one CUDA device: the eager peak, then shares of it and the lowest reachable peak.

    python -m tests.benchmarks.budgets rows.jsonl [--only resnet50 gpt2] [--deadline-s 540]

Every row is measured by real training steps and appended to the file as one JSON object, so that a stopped run resumes
where it was; ``results.py`` turns the file into tables. Each workload runs in a process of its own. The exit code is 1
if a rewritten model went over a feasible budget, was not equivalent or failed, else 0.
"""

import argparse
import functools
import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memrewrite import target
from memrewrite.api import OptimizedModule, optimize
from memrewrite.errors import BudgetInfeasibleError, MemrewriteError
from memrewrite.inputs import to_device
from memrewrite.measure import measure
from memrewrite.options import Budget
from memrewrite.step import Inputs, Step
from memrewrite.stepspec import StepSpec
from tests.benchmarks.results import EAGER, Row, read

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = ["80%", "60%", "45%", "33%", "min"]


@dataclass(frozen=True)
class Workload:
    """One training step: an example at a batch size, with an optimizer, under autocast or not."""

    example: str
    batch_size: int
    spec: StepSpec


# Batch sizes that put the eager peak between 10 and 40 GB.
WORKLOADS = {
    "seed_mlp": Workload("seed_mlp", 2048, StepSpec(optimizer="sgd")),
    "efficientnet": Workload("efficientnet", 128, StepSpec()),
    "efficientnet-bf16": Workload("efficientnet", 256, StepSpec(amp="bf16")),
    "resnet50": Workload("resnet50", 192, StepSpec()),
    "resnet50-bf16": Workload("resnet50", 384, StepSpec(amp="bf16")),
    "unet": Workload("unet", 16, StepSpec()),
    "gpt2-bf16": Workload("gpt2", 16, StepSpec(amp="bf16")),
}


@dataclass
class Bench:
    """One workload on its device, and the file its rows go to."""

    name: str
    path: Path
    module: nn.Module
    inputs: Inputs
    step: Step

    def run(self, budgets: list[str], end: float) -> None:
        """Measure eager, then every budget that the file lacks, as long as ``time.monotonic()`` is before ``end``."""
        rows = {row.budget: row for row in read(self.path) if row.workload == self.name}
        eager = rows.get(EAGER) or self.eager()
        for budget in budgets:
            if budget not in rows and time.monotonic() < end:
                self.budget(budget, eager)

    def eager(self) -> Row:
        """The row of the unchanged model."""
        measured = measure(self.module, self.inputs, self.step)
        return self.add(EAGER, passed=True, verdict=EAGER, measured=measured.peak, step_ms=measured.step_ms)

    def budget(self, budget: str, eager: Row) -> Row:
        """The row of one budget, a share of the eager row's peak."""
        bound = Budget.parse(budget).resolve(eager.measured or 0)
        add = functools.partial(self.add, budget, bound=bound)
        self.clear()
        started = time.perf_counter()
        try:
            optimized = self.optimize(bound or budget)
            seconds = time.perf_counter() - started
            self.clear()
            measured = measure(optimized, self.inputs, self.step)
        except BudgetInfeasibleError as error:
            return add(passed=True, lowest=error.lowest, verdict=f"infeasible, lowest {error.lowest / 1e9:.2f} GB")
        except (MemrewriteError, torch.OutOfMemoryError) as error:
            return add(passed=False, verdict=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        over = bound is not None and measured.peak > bound
        verdict = "over budget" if over else "equivalent" if optimized.report.equivalent else "not equivalent"
        return add(
            passed=verdict == "equivalent",
            verdict=verdict,
            predicted=optimized.report.predicted_after.peak,
            measured=measured.peak,
            step_ms=measured.step_ms,
            segments=len(optimized.report.segments),
            optimize_s=seconds,
        )

    def optimize(self, budget: int | str) -> OptimizedModule:
        """The rewritten model, with its report."""
        return optimize(
            self.module,
            self.inputs.args,
            budget=budget,
            optimizer=self.step.optimizer,
            amp=self.step.amp,
        )

    def add(self, budget: str, **figures: Any) -> Row:
        """Append a row to the file and print it."""
        row = Row(
            workload=self.name,
            budget=budget,
            batch_size=self.inputs.tensors()[0].shape[0],
            amp=WORKLOADS[self.name].spec.amp,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            torch=torch.__version__,
            **figures,
        )
        line = json.dumps(asdict(row))
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
        return row

    def clear(self) -> None:
        """Leave nothing of the last row on the device but the model and its inputs."""
        self.module.zero_grad(set_to_none=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    options = _parse()
    names = options.only or list(WORKLOADS)
    end = time.monotonic() + options.deadline_s
    if len(names) == 1:
        _bench(names[0], options).run(options.budgets, end)
        failed = []
    else:
        failed = [name for name in names if time.monotonic() < end and _run_in_child(name, options, end) != 0]
    for row in read(options.rows):
        if row.workload in names and not row.passed:
            failed.append(f"{row.workload} {row.budget}: {row.verdict}")
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Peaks and step times of the examples against budgets.")
    parser.add_argument("rows", type=Path, help="JSON-lines file to append to and to resume from")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="run these workloads only")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, help="shares of the eager peak, bytes, or min")
    parser.add_argument("--deadline-s", type=float, default=float("inf"), help="start no row after that many seconds")
    parser.add_argument("--batch-size", type=int, help="instead of each workload's own")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def _bench(name: str, options: argparse.Namespace) -> Bench:
    torch.manual_seed(0)
    workload, device = WORKLOADS[name], torch.device(options.device)
    batch_size = options.batch_size or workload.batch_size
    loaded = target.load(str(ROOT / f"examples/{workload.example}.py"), batch_size=batch_size)
    inputs = to_device(loaded.inputs, device)
    return Bench(name, options.rows, loaded.module.to(device), inputs, workload.spec.build())


def _run_in_child(name: str, options: argparse.Namespace, end: float) -> int:
    """Run one workload in a fresh process, so that nothing it leaves on the device touches the next; its exit code."""
    command = [sys.executable, "-m", "tests.benchmarks.budgets", str(options.rows.resolve())]
    command += ["--only", name, "--device", options.device]
    command += ["--deadline-s", str(end - time.monotonic()), "--budgets", *options.budgets]
    if options.batch_size is not None:
        command += ["--batch-size", str(options.batch_size)]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
