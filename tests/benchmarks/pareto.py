"""Peak against step time on one CUDA device: eager, block checkpointing, sqrt(n) segments, torch.compile, memrewrite.

    python -m tests.benchmarks.pareto FOLDER [--only resnet50 unet] [--contenders eager ours] [--deadline-s 540]

Every (workload, contender) becomes a row of ``FOLDER/pareto.jsonl``; a stopped run resumes where it was. Each has a
process of its own; ``--jobs`` of them, of all workloads, plan and compile side by side. One that is ready frees what it
can and trains alone on the device, while the others are stopped.
"""

import argparse
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memrewrite.records.errors import BudgetInfeasibleError
from tests.benchmarks import contenders
from tests.benchmarks.contenders import CONTENDERS, EAGER, MINIMUM, PLANNED, bound, kind, phase
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import INFEASIBLE, PARETO, ParetoRow, append, attempt, machine, read
from tests.benchmarks.trial import Trial, clear
from tests.benchmarks.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
READY = "ready"
_NO_MEMORY = "out of memory"
CROWDED = 3  # the exit code of a process that ran out of memory while others had some of it
_USABLE = 0.9  # of the device's memory, for processes side by side
_CONTEXT = 10**9  # bytes that each of them takes besides
_STEPS = {"cuda": 15, "cpu": 5}


@dataclass
class Bench:
    """One workload on its device, with another batch or optimizer where those are given.

    ``gate`` is called when a contender is ready to be timed.
    """

    name: str
    path: Path
    device: torch.device
    tiny: bool = False
    batch: int | None = None
    gate: Callable[[], None] | None = None
    optimizer: str | None = None
    verified: bool = True

    @property
    def workload(self) -> Workload:
        """What is trained."""
        known = WORKLOADS[self.name]
        return replace(known, batch=self.batch or known.batch, optimizer=self.optimizer or known.optimizer)

    def rows(self) -> dict[str, ParetoRow]:
        """What the file has of this workload, by contender."""
        return {row.contender: row for row in read(self.path, ParetoRow) if row.workload == self.name}

    def run(self, names: list[str], end: float = float("inf")) -> None:
        """Add the rows that the file lacks, as long as ``time.monotonic()`` is before ``end``."""
        for contender in names:
            if contender not in self.rows() and time.monotonic() < end:
                append(self.path, self.contend(contender))

    def contend(self, contender: str) -> ParetoRow:
        """Train one contender; what it fails with is a result too. The lowest peak is verified where memory allows."""
        verify = self.verified and contender == MINIMUM
        row = attempt(lambda: self._contend(contender, verify), lambda why: self._failed(contender, why))
        if verify and not row.ok and _NO_MEMORY in row.note:
            row = attempt(lambda: self._contend(contender, False), lambda why: self._failed(contender, why))
        return row

    def _contend(self, contender: str, verify: bool) -> ParetoRow:
        workload = self.workload
        others = clear(self.device)
        torch.manual_seed(0)
        with self.device:
            model, inputs = workload.build(self.tiny), workload.inputs(workload.batch, self.tiny)
        started = time.perf_counter()
        try:
            ready = contenders.prepare(contender, workload, model, inputs, self.rows(), verify=verify)
        except BudgetInfeasibleError as error:
            budget = contenders.bound(contender, self.rows())
            return self.row(contender, ok=False, note=INFEASIBLE, budget=budget, lowest=error.lowest)
        trial = Trial(ready.module, ready.inputs or inputs, ready.step or workload.step(), others)
        trial.warm_up()
        seconds = time.perf_counter() - started
        if self.gate is not None:
            self.gate()
        about = {"budget": ready.budget, "predicted": ready.told(), "segments": ready.segments, "note": ready.note}
        return self.row(contender, ok=True, setup_s=seconds, **about, **trial.figures(_STEPS[self.device.type]))

    def _failed(self, contender: str, why: str) -> ParetoRow:
        if self.gate is not None and _NO_MEMORY in why:
            sys.exit(CROWDED)
        return self.row(contender, ok=False, note=why)

    def row(self, contender: str, **figures: Any) -> ParetoRow:
        """A row of this workload."""
        workload = self.workload
        return ParetoRow(
            workload=self.name,
            batch=workload.batch,
            amp=workload.amp,
            optimizer=workload.optimizer,
            contender=contender,
            loop=str(workload.step().loop),
            **machine(self.device),
            **figures,
        )


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    options = _parse()
    end = time.monotonic() + options.deadline_s
    wanted = [c for c in CONTENDERS if options.contenders is None or {c, kind(c)} & set(options.contenders)]
    gate, device = _wait_for_turn if options.gate else None, torch.device(options.device)
    path = options.folder / PARETO
    benches = [
        Bench(name, path, device, options.tiny, options.batch, gate, options.optimizer, not options.no_verify)
        for name in options.only or WORKLOADS
    ]
    if options.child:
        for bench in benches:
            bench.run(wanted, end)
    else:
        _run([_Parent(bench, options, end) for bench in benches], wanted)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Peak against step time, one row per workload and contender.")
    parser.add_argument("folder", type=Path, help="where pareto.jsonl is kept and resumed from")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="run these workloads only")
    parser.add_argument("--contenders", nargs="+", help="run these only: eager, ours, 'ours 50%%', compile, ...")
    parser.add_argument("--deadline-s", type=float, default=float("inf"), help="stop after that many seconds")
    parser.add_argument("--jobs", type=int, default=6, help="how many may compile side by side")
    parser.add_argument("--batch", type=int, help="instead of each workload's own")
    parser.add_argument("--optimizer", help="likewise: sgd, module:factory, ...")
    parser.add_argument("--no-verify", action="store_true", help="do not verify the lowest peak either")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gate", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _wait_for_turn() -> None:
    print(READY, flush=True)
    if not sys.stdin.readline():
        sys.exit("Whoever gives the turns is gone.")


@dataclass
class _Parent:
    """Gives the contenders of one workload their processes."""

    bench: Bench
    options: argparse.Namespace
    end: float

    def run(self, wanted: list[str]) -> None:
        """Run what is missing of contenders that share a process; after one that dies, the next process goes on."""
        while missing := self.missing(wanted):
            with self.process(missing) as process:
                code = process.wait()
            self.account_for(missing[0], code)

    def missing(self, wanted: list[str]) -> list[str]:
        """Those without a row, as long as there is time."""
        rows = self.bench.rows()
        return [c for c in wanted if c not in rows] if time.monotonic() < self.end else []

    def needs(self, contender: str) -> int:
        """About how many bytes of the device a contender takes: its budget, else what it would without one."""
        rows = self.bench.rows()
        eager = rows[EAGER].peak if EAGER in rows else None
        if kind(contender) not in PLANNED:
            return eager or 0
        try:
            return bound(contender, rows) or min((row.peak for row in rows.values() if row.peak), default=0)
        except ValueError:  # its peer has not run
            return eager or 0

    def account_for(self, contender: str, code: int) -> None:
        """A row for a contender whose process ended without one, unless it was for lack of time."""
        if self.missing([contender]):
            append(self.bench.path, self.bench.row(contender, ok=False, note=f"its process ended with code {code}"))

    @contextmanager
    def process(self, names: list[str], gate: bool = False) -> Iterator["subprocess.Popen[str]"]:
        """A process that runs ``names``, killed when time is up."""
        left = self.end - time.monotonic()
        command = [sys.executable, "-m", "tests.benchmarks.pareto", str(self.options.folder.resolve()), "--child"]
        command += ["--only", self.bench.name, "--device", self.options.device, "--deadline-s", str(left)]
        command += ["--contenders", *names]
        command += ["--tiny"] * self.options.tiny + ["--gate"] * gate + ["--no-verify"] * self.options.no_verify
        if self.bench.batch is not None:
            command += ["--batch", str(self.bench.batch)]
        if self.bench.optimizer is not None:
            command += ["--optimizer", self.bench.optimizer]
        pipe = subprocess.PIPE if gate else None
        threads = str(max(4, (os.cpu_count() or 1) // self.options.jobs))  # they compile in bursts
        environment = {**os.environ, **({"TORCHINDUCTOR_COMPILE_THREADS": threads} if gate else {})}
        process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=environment)
        clock = threading.Timer(min(left, threading.TIMEOUT_MAX), process.kill)
        clock.daemon = True
        clock.start()
        try:
            yield process
        finally:
            clock.cancel()
            process.kill()
            process.wait()


def _run(parents: list[_Parent], wanted: list[str]) -> None:
    """Run what is missing, in the order of phases: budgets come from the others' rows."""
    for at in sorted(set(map(phase, wanted))):
        left = [(parent, c) for parent in parents for c in parent.missing([c for c in wanted if phase(c) == at])]
        while left:
            count = _how_many(left)
            _side_by_side(left[:count])
            left = left[count:]
    for parent in parents:  # what ran out of memory beside others
        for contender in parent.missing(wanted):
            parent.run([contender])


def _how_many(waiting: list[tuple[_Parent, str]]) -> int:
    """How many of the first have room on the device side by side, at least one; none beside another on the CPU."""
    first = waiting[0][0]
    if first.bench.device.type != "cuda":
        return 1
    total = torch.cuda.get_device_properties(first.bench.device).total_memory
    needed = itertools.accumulate(parent.needs(contender) + _CONTEXT for parent, contender in waiting)
    fitting = sum(size <= _USABLE * total for size in needed)
    return max(1, min(first.options.jobs, fitting))


def _side_by_side(waiting: list[tuple[_Parent, str]]) -> None:
    """Start a process for each, and give each its turn once it is ready; all others are stopped meanwhile."""
    ready: queue.SimpleQueue[int] = queue.SimpleQueue()
    with ExitStack() as stack:
        running = [stack.enter_context(parent.process([contender], gate=True)) for parent, contender in waiting]
        for index, process in enumerate(running):
            threading.Thread(target=_watch, args=(process, ready, index), daemon=True).start()
        for _ in running:
            process = running[ready.get()]
            with _stopped([other for other in running if other is not process and other.poll() is None]):
                print(process.communicate("go\n")[0], end="", flush=True)
        for (parent, contender), process in zip(waiting, running, strict=True):
            if process.wait() != CROWDED:
                parent.account_for(contender, process.returncode)


def _watch(process: "subprocess.Popen[str]", ready: "queue.SimpleQueue[int]", index: int) -> None:
    """Tell when a process says that it is ready, or has ended."""
    for line in process.stdout or ():
        if line.strip() == READY:
            break
        print(line, end="", flush=True)
    ready.put(index)


@contextmanager
def _stopped(processes: list["subprocess.Popen[str]"]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
