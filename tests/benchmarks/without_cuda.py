"""The eager peaks that ``pareto`` measured on CUDA, predicted without using CUDA: a Markdown table.

    python -m tests.benchmarks.without_cuda FOLDER [--only resnet50 gpt2_medium]

FOLDER holds ``pareto.jsonl``, ``tests/benchmarks/measured`` for one. Runs anywhere, on fake tensors; models are built.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

from memrewrite.api import simulate_original
from memrewrite.simulate.workspaces import workspace_bytes
from tests.benchmarks.contenders import EAGER
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import PARETO, ParetoRow, read


def predicted(row: ParetoRow, tiny: bool = False) -> int:
    """The peak in bytes of the row's workload, as a CUDA step on the CPU's fake tensors."""
    workload = WORKLOADS[row.workload]
    torch.manual_seed(0)
    model, inputs = workload.build(tiny), workload.inputs(row.batch, tiny)
    step = replace(workload.step(), as_cuda=True)
    workspace = workspace_bytes(torch.device("cpu"), step.amp, step.mode, step.as_cuda)
    return simulate_original(model, inputs, step, workspace).peak


def main() -> int:
    """Print a row per workload, then the median and the worst error."""
    parser = argparse.ArgumentParser(description="Peaks on CUDA, predicted without it, against those measured.")
    parser.add_argument("folder", type=Path, help="where pareto.jsonl is")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    options = parser.parse_args()
    print("| workload | predicted | measured | error |\n| --- | --- | --- | --- |")
    errors = []
    for row in read(options.folder / PARETO, ParetoRow):
        if row.contender == EAGER and row.peak and row.workload in options.only:
            peak = predicted(row, options.tiny)
            errors.append(peak / row.peak - 1)
            amp = "" if row.amp == "off" else f", {row.amp}"
            print(
                f"| {row.workload}, batch {row.batch}{amp} | {peak / 1e9:.2f} GB | {row.peak / 1e9:.2f} GB "
                f"| {errors[-1]:+.2%} |",
                flush=True,
            )
    sizes = [abs(error) for error in errors]
    print(f"\nmedian {statistics.median(sizes):.2%}, worst {max(sizes):.2%}, {len(sizes)} workloads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
