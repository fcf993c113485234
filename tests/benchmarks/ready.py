"""Seconds of ``optimize`` by stage: what a user waits for before the first step of a script that starts.

    python -m tests.benchmarks.ready FILE [--only resnet50 ...] [--budget 60%] [--again] [--tiny | --without-cuda]

Every workload of ``pareto`` starts in a process of its own, on CUDA or in ``--tiny`` form on the CPU, and becomes a row
of ``FILE``; a stopped run resumes there. ``--without-cuda`` plans for CUDA without using it, of full size: nothing is
verified or measured then, and seconds are the CPU's, which other work on it changes less. ``--again`` starts each a
second time, in a process that finds the plan of the first in a cache on disk.
Of the stages, ``simulating`` and ``measuring`` are the parts of planning that look at candidates. ``pace`` is what the
host takes for one operator on a fake tensor, in microseconds: seconds of hosts that differ in it are not comparable.
"""

import argparse
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memrewrite
from memrewrite.measurement import measuring
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import ReadyRow, append, attempt, machine, read
from tests.zoo.models import declare_operators

_TINY_BATCH = 4
_PARTS = {"predict": "simulating", "measure": "measuring"}  # of planning, by the function that both are asked of


class Clock:
    """Seconds by stage, told of each stage as it begins; ``now`` says what time it is."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._now = now
        self._stage, self._since = "prepare", now()

    def __call__(self, stage: str) -> None:
        """``stage`` begins, and the one before ends."""
        now = self._now()
        self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Also add up what looking at candidates takes while the plan is made."""

        def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                planning, begun = self._stage == "plan", self._now()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.seconds[part] += planning * (self._now() - begun)

            return run

        with ExitStack() as stack:
            for name, part in _PARTS.items():
                stack.enter_context(mock.patch.object(measuring, name, timed(getattr(measuring, name), part)))
            yield


def pace(operators: int = 5000) -> float:
    """Microseconds of the CPU for a linear layer on fake tensors, which is known after the first."""
    with FakeTensorMode():
        x, weight = torch.empty(4, 8), torch.empty(8, 8)
        torch.nn.functional.linear(x, weight)
        begun = time.process_time()
        for _ in range(operators):
            torch.nn.functional.linear(x, weight)
        return 1e6 * (time.process_time() - begun) / operators


def run(
    name: str, budget: str, device: str, tiny: bool, without_cuda: bool = False, cache: str | Literal[False] = False
) -> ReadyRow:
    """Optimize one workload; what fails is a row with the reason, and the seconds until then."""
    workload, clock = WORKLOADS[name], Clock(time.process_time if without_cuda else time.perf_counter)
    batch = _TINY_BATCH if tiny else workload.batch
    about: dict[str, Any] = {"workload": name, "batch": batch, "amp": workload.amp, "optimizer": workload.optimizer}
    about |= {"budget": budget, "pace": round(pace(), 1), **machine(torch.device(device))}

    def ready() -> ReadyRow:
        torch.manual_seed(0)
        with torch.device(device):
            model, inputs = workload.build(tiny).train(), workload.inputs(batch, tiny)
        step = workload.step()
        clock("prepare")
        clock.seconds.clear()  # of making the model
        try:
            with clock.looking():
                result = memrewrite.optimize(
                    model,
                    inputs.args,
                    example_kwargs=inputs.kwargs,
                    budget=budget,
                    optimizer=step.optimizer,
                    amp=step.amp,
                    returns=workload.returns,
                    passes="all" if workload.returns == "loss" else None,
                    device="cuda" if without_cuda else None,
                    verify=not without_cuda,
                    progress=clock,
                    cache=cache,
                )
        finally:
            clock("")  # which ends the last stage
        return ReadyRow(
            ok=True, note=result.report.verdict, peak=result.report.predicted_after.peak, **times(), **about
        )

    def times() -> dict[str, Any]:
        seconds = {stage: round(took, 3) for stage, took in clock.seconds.items() if stage}
        return {"stages": seconds, "seconds": sum(s for stage, s in seconds.items() if stage not in _PARTS.values())}

    return attempt(ready, lambda why: ReadyRow(ok=False, note=why, **times(), **about))


def table(rows: list[ReadyRow]) -> str:
    """Seconds, a line for each workload and a column for each stage."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.stages))
    lines = [["", "pace", "all", "again", *stages]]
    for row in rows:
        told = (row.pace, row.seconds, row.again, *(row.stages.get(stage) for stage in stages))
        lines.append([row.workload, *("" if figure is None else f"{figure:.1f}" for figure in told)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _alone(*args: Any) -> ReadyRow:
    declare_operators()
    return run(*args)


def _starts(name: str, options: argparse.Namespace, device: str) -> ReadyRow:
    """A first start, and with ``--again`` a second one, each in a process of its own."""
    with TemporaryDirectory() as folder:
        cache = folder if options.again else False
        asked = name, options.budget, device, options.tiny, options.without_cuda, cache
        rows = []
        for _ in range(1 + options.again):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rows.append(pool.submit(_alone, *asked).result())
        return replace(rows[0], again=rows[1].seconds if options.again and rows[1].ok else None)


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    parser = argparse.ArgumentParser(description="Seconds of optimize by stage, one row per workload.")
    parser.add_argument("file", type=Path, help="where the rows are kept and resumed from")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help="run these workloads only")
    parser.add_argument("--budget", default="min", help="as optimize takes it")
    parser.add_argument("--again", action="store_true", help="start each a second time, with the plan of the first")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--tiny", action="store_true", help="tiny models of the same families, on the CPU")
    where.add_argument("--without-cuda", action="store_true", help="plan for CUDA on the CPU, in seconds of that")
    options = parser.parse_args()
    device = "cpu" if options.tiny or options.without_cuda else "cuda"
    done = {(row.workload, row.budget) for row in read(options.file, ReadyRow)}
    for name in options.only:
        if (name, options.budget) not in done:
            append(options.file, _starts(name, options, device))
    print(table(read(options.file, ReadyRow)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
