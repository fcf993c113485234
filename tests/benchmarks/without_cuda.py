"""What ``pareto`` (eager) and ``predict`` measured on CUDA, predicted without using CUDA: a Markdown table.

    python -m tests.benchmarks.without_cuda FOLDER [--only resnet50 gpt2_medium]

FOLDER holds ``pareto.jsonl`` or ``predict.jsonl``, ``tests/benchmarks/measured`` for one. Runs anywhere, on fake
tensors; models are built. Left out are rewritten models and those whose course depends on values.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from memrewrite.measurement.original import simulate_original
from memrewrite.records.errors import DataDependentError
from memrewrite.records.loop import Loop
from memrewrite.simulate import Timeline
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.workload.step import Inputs, Step
from tests.benchmarks.contenders import EAGER
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.predict import CASES
from tests.benchmarks.rows import PARETO, PREDICT, ParetoRow, PredictRow, read

Bytes = tuple[int | None, int | None]
Build = Callable[[], tuple[nn.Module, Inputs]]


def predicted(build: Build, step: Step) -> Timeline:
    """That model's step on CUDA, on the CPU's fake tensors."""
    model, inputs = build()
    step = replace(step, target=CUDA_FROM_CPU)
    workspace = step.target.workspace_bytes(torch.device("cpu"), step.amp, step.mode)
    return simulate_original(model, inputs, step, workspace)


def measured(folder: Path, only: list[str] | None, tiny: bool) -> Iterator[tuple[str, Bytes, Build, Step]]:
    """How it is called, what was measured, allocated and reserved, and what it was."""
    for row in read(folder / PARETO, ParetoRow):
        if row.contender == EAGER and row.peak and row.workload in (only or WORKLOADS):
            name = f"{row.workload}, batch {row.batch}" + ("" if row.amp == "off" else f", {row.amp}")
            yield (
                name,
                (row.peak, row.reserved),
                functools.partial(_workload, row, tiny),
                replace(WORKLOADS[row.workload].step(), loop=Loop.parse(row.loop)),
            )
    peaks = {row.workload: (row.measured, row.reserved) for row in read(folder / PREDICT, PredictRow)}
    for case in CASES:
        peak = peaks.get(case.name, (None, None))
        if peak[0] and not case.budget and case.model in (only or [case.model]):
            yield case.name, peak, functools.partial(case.build, tiny), case.step()


def _workload(row: ParetoRow, tiny: bool) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return WORKLOADS[row.workload].build(tiny), WORKLOADS[row.workload].inputs(row.batch, tiny)


def main() -> int:
    """Print a row per step, then the median and the worst error."""
    parser = argparse.ArgumentParser(description="Peaks on CUDA, predicted without it, against those measured.")
    parser.add_argument("folder", type=Path, help="where pareto.jsonl or predict.jsonl is")
    parser.add_argument("--only", nargs="+", help="these models only")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    options = parser.parse_args()
    print("| step | predicted | measured | error | reserved, predicted | reserved | error |\n|" + " --- |" * 7)
    errors: tuple[list[float], list[float]] = [], []
    for name, real, build, step in measured(options.folder, options.only, options.tiny):
        try:
            found = predicted(build, step)
        except DataDependentError:
            continue
        cells = [name]
        for size, known, seen in zip((found.peak, found.reserved), real, errors, strict=True):
            if known is not None:
                seen.append(size / known - 1)
                cells += [f"{size / 1e9:.2f} GB", f"{known / 1e9:.2f} GB", f"{seen[-1]:+.2%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    for kind, seen in zip(("the peak", "what is reserved"), errors, strict=True):
        if sizes := [abs(error) for error in seen]:
            print(f"\n{kind}: median {statistics.median(sizes):.2%}, worst {max(sizes):.2%}, {len(sizes)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
