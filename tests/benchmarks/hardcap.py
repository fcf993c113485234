"""Training under a hard cap: the process may not hold more than the budget and 3 %, and must not run out of memory.

    python -m tests.benchmarks.hardcap FOLDER [--only resnet50 unet] [--share 0.5] [--steps 300] [--reserved]

One process plans each workload for a share of its activations (``--reserved``: a budget of reserved bytes). A fresh one
trains the result, with PyTorch's allocator as it comes, under ``torch.cuda.set_per_process_memory_fraction``. That
counts the segments that the allocator reserves (``alloc_block`` in ``c10/cuda/CUDACachingAllocator.cpp``), so nothing
is added for the CUDA context. Two steps of three take smaller batches. Every workload becomes a row of
``FOLDER/hardcap.jsonl``; at the end they stand in a Markdown table.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memrewrite.measurement.original import simulate_original
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate import requests
from memrewrite.workload.inputs import to_device
from memrewrite.workload.step import Inputs
from tests.benchmarks.contenders import rewritten
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import HARDCAP, CapRow, append, attempt, machine, read
from tests.benchmarks.trial import clear

ROOT = Path(__file__).resolve().parents[2]
_PLANNED = "planned.jsonl"  # what the training process is told
_ROOM = 1.03  # of the budget is what the process may reserve
_TINY_BATCH = 4
_SIZES = (1.0, 0.75, 0.5)  # of the batch, one after another


@dataclass(frozen=True)
class Capped:
    """A workload to be trained on ``device`` for ``steps`` steps under a budget for ``share`` of its activations."""

    name: str
    device: torch.device
    share: float
    steps: int
    reserved: bool
    tiny: bool

    def inputs(self, size: float = 1.0) -> Inputs:
        """That part of a batch, on the device."""
        torch.manual_seed(0)
        workload = WORKLOADS[self.name]
        with self.device:
            return workload.inputs(max(1, int(size * (_TINY_BATCH if self.tiny else workload.batch))), self.tiny)

    def plan(self, file: Path) -> CapRow:
        """Rewrite the workload into ``file``; the row has the figures of the plan."""
        workload, inputs, step = WORKLOADS[self.name], self.inputs(), WORKLOADS[self.name].step()
        with self.device:
            model = workload.build(self.tiny)
        workspace = step.target.workspace_bytes(self.device, step.amp, step.mode)
        before = simulate_original(model, inputs, step, workspace)
        top = before.reserved if self.reserved else before.peak
        budget = before.floor + int(self.share * (top - before.floor))
        try:
            ready = rewritten(budget, step, model, inputs, reserved=self.reserved)
        except BudgetInfeasibleError as error:  # then for the lowest there is
            budget = int(1.02 * error.lowest)
            ready = rewritten(budget, step, model, inputs, reserved=self.reserved)
        cap = int(_ROOM * budget)
        reserved = requests(ready.module, inputs, step, workspace_bytes=workspace).reserved_under(cap)
        torch.save(ready.module, file)
        return self.row(ok=True, budget=budget, cap=cap, predicted=ready.predicted, predicted_reserved=reserved)

    def train(self, file: Path, planned: CapRow) -> CapRow:
        """Train what ``file`` has under the cap; running out of memory is a result."""
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            total = torch.cuda.mem_get_info(self.device)[1]
            torch.cuda.set_per_process_memory_fraction((planned.cap or total) / total, torch.cuda.current_device())
        WORKLOADS[self.name].build(True)  # so that the module's own file is there to be found
        module: nn.Module = torch.load(file, map_location=self.device, weights_only=False)
        step, host = WORKLOADS[self.name].step(), replace(self, device=torch.device("cpu"))
        batches = [host.inputs(size) for size in _SIZES]
        optimizer = step.make_optimizer(module)
        started, done, held, why = time.perf_counter(), 0, 0, ""
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)  # at any size the rewritten program is to run
            try:
                loop = step.begin(module, Inputs((), {}), optimizer)
                for batch in itertools.islice(itertools.cycle(batches), self.steps):
                    loop.inputs = Inputs((), {})  # the last batch is gone before the next one comes
                    loop.inputs = to_device(batch, self.device)
                    loop.take()
                    done += 1
                    if on_cuda and done == 1:  # in which room was made: that is no peak of a step
                        held = torch.cuda.max_memory_reserved(self.device)
                        torch.cuda.reset_peak_memory_stats(self.device)
            except torch.OutOfMemoryError:
                why = f"out of memory in step {done + 1}"
        figures: dict[str, Any] = {}
        if on_cuda:
            torch.cuda.synchronize(self.device)
            found = torch.cuda.memory_stats(self.device)
            figures = {"peak": found["allocated_bytes.all.peak"], "retries": found["num_alloc_retries"]}
            figures["reserved"] = max(held, found["reserved_bytes.all.peak"])
        seconds = time.perf_counter() - started
        known = {**asdict(planned), "ok": not why, "note": why, "steps": done, "seconds": seconds}
        return CapRow(**{**known, **figures})

    def row(self, **figures: Any) -> CapRow:
        """A row of this workload."""
        workload = WORKLOADS[self.name]
        return CapRow(
            workload=f"{self.name}{' reserved' * self.reserved}",
            batch=workload.batch,
            amp=workload.amp,
            optimizer=workload.optimizer,
            **machine(self.device),
            **figures,
        )


def table(rows: list[CapRow]) -> str:
    """One line per workload, in Markdown."""
    columns = [
        "workload",
        "budget",
        "cap",
        "reserved, simulated",
        "reserved",
        "allocated",
        "retries",
        "steps",
        "result",
    ]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        sizes = (row.budget, row.cap, row.predicted_reserved, row.reserved, row.peak)
        cells = ["" if size is None else f"{size / 1e9:.2f} GB" for size in sizes]
        counts = ["" if count is None else str(count) for count in (row.retries, row.steps)]
        lines.append([row.workload, *cells, *counts, "trained" if row.ok else row.note])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Run what the file lacks; exit with 1 where a workload did not train."""
    options = _parse()
    path = options.folder / HARDCAP
    for name in options.only or WORKLOADS:
        case = Capped(name, torch.device(options.device), options.share, options.steps, options.reserved, options.tiny)
        if options.child:
            append(path, _trained(case, options))
        elif case.row(ok=False).workload not in {row.workload for row in read(path, CapRow)}:
            _both(case, options)
    rows = read(path, CapRow)
    if not options.child:
        print(table(rows))
    return 0 if all(row.ok for row in rows) else 1


def _both(case: Capped, options: argparse.Namespace) -> None:
    """Plan here, train in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="memrewrite-") as scratch:
        file = Path(scratch) / "module.pt"
        clear(case.device)
        planned = attempt(lambda: case.plan(file), lambda why: _failed(case, why))
        clear(case.device)
        if not planned.ok:
            append(options.folder / HARDCAP, planned)
            return
        append(options.folder / _PLANNED, planned)
        command = [sys.executable, "-m", "tests.benchmarks.hardcap", str(options.folder.resolve()), "--only", case.name]
        command += ["--device", options.device, "--steps", str(case.steps), "--child", str(file)]
        command += ["--tiny"] * case.tiny + ["--reserved"] * case.reserved
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if case.row(ok=False).workload not in {row.workload for row in read(options.folder / HARDCAP, CapRow)}:
            append(options.folder / HARDCAP, _failed(case, f"its process ended with code {code}"))


def _trained(case: Capped, options: argparse.Namespace) -> CapRow:
    planned = read(options.folder / _PLANNED, CapRow)[-1]
    return attempt(lambda: case.train(options.child, planned), lambda why: replace(planned, ok=False, note=why))


def _failed(case: Capped, why: str) -> CapRow:
    return case.row(ok=False, note=why)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training under a cap of the budget and 3 %.")
    parser.add_argument("folder", type=Path, help="where hardcap.jsonl is kept and resumed from")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="run these workloads only")
    parser.add_argument("--share", type=float, default=0.5, help="of the activations, what the budget leaves room for")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--reserved", action="store_true", help="budgets of reserved bytes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
