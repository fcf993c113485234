"""The back end of ``torch.compile`` against PyTorch's own budget for activations, in peak bytes and step time.

    python -m tests.benchmarks.backend FILE.json [--only unet gpt2] [--deadline-s 540] [--tiny]

For each workload ``torch.compile`` is trained at each ``activation_memory_budget``, then ours at the peaks that took,
and at the lowest it reaches. FILE holds all rows; it is written anew after each, and a stopped run goes on from there.
Peaks are told in advance by the code that Inductor made, and by the plan before there was any. Processes of several
files may compile side by side: with ``--lock PATH`` one at a time is timed. ``--tiny`` is a smoke test on the CPU with
small models and budgets in percent, where no peak is measured. In ``gpt2_medium-breaks`` graphs break at two blocks;
``gpt2_medium-lengths`` is compiled for any length and takes steps at shorter ones, too, whose peaks are told with it:
a quarter of its blocks, as PyTorch takes more than five minutes to compile all of them so.
"""

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

from memrewrite.backends import entry
from memrewrite.backends.partition import Partition
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.workload.step import Inputs
from tests.benchmarks.language import GPT2
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import machine, reason
from tests.benchmarks.trial import Trial, clear
from tests.benchmarks.workload import Workload

_STOCK = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0)
_TINY = ("100%", "60%", "min")
_MARGIN = 1.002  # of a stock peak: what the allocator's blocks differ by from process to process
_SHARES = (0.75, 0.5, 0.25)  # of the longest text, in steps at other lengths
Row = dict[str, Any]


class Break(nn.Module):
    """A block before which the graph breaks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return self.block(x, *args, **kwargs)


def _with_breaks(tiny: bool) -> nn.Module:
    model = GPT2.build(tiny)
    blocks: Any = model.get_submodule("transformer.h")
    for at in (len(blocks) // 3, 2 * len(blocks) // 3):
        blocks[at] = Break(blocks[at])
    return model


def _a_quarter(tiny: bool) -> nn.Module:
    model = GPT2.build(tiny)
    blocks: Any = model.get_submodule("transformer.h")
    del blocks[max(len(blocks) // 4, 1) :]
    return model


_BREAKS, _LENGTHS = "gpt2_medium-breaks", "gpt2_medium-lengths"
CASES: dict[str, Workload] = {
    **WORKLOADS,
    _BREAKS: replace(GPT2, build=_with_breaks),
    _LENGTHS: replace(GPT2, build=_a_quarter),
}


def wanted(name: str, rows: list[Row], shares: list[float], tiny: bool) -> Iterator[tuple[str, Any]]:
    """The contenders of a workload, each with its setting; ours once those it is compared with are measured."""
    for share in shares:
        yield f"stock {share}", share
    if tiny:
        yield from ((f"ours {budget}", budget) for budget in _TINY)
        return
    for share in shares:
        found = [row for row in rows if row["workload"] == name and row["contender"] == f"stock {share}" and row["ok"]]
        if found:
            yield f"ours at stock {share}", int(found[0]["peak"] * _MARGIN)
    yield "ours min", "min"


def trained(name: str, contender: str, setting: Any, tiny: bool, lock: Path | None) -> Row:
    """One row: the steps of one contender, measured."""
    device = torch.device("cpu" if tiny else "cuda")
    workload = CASES[name]
    others = clear(device)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with device:
        model, inputs = workload.build(tiny), workload.inputs(2 if tiny else workload.batch, tiny)
    partitions: list[Partition] = []
    started = time.perf_counter()
    ours = contender.startswith("ours")
    row: Row = {"workload": name, "contender": contender, "setting": setting, **machine(device)}
    options = {"budget": setting, "optimizer": workload.optimizer}
    dynamic: Any = {"dynamic": True} if name == _LENGTHS else {}
    with functorch.patch(activation_memory_budget=1.0 if ours else setting), _watched(partitions):
        by: Any = {"backend": entry.memrewrite, "options": options} if ours else {}
        module = torch.compile(model, **by, **dynamic)
        try:
            figures = _figures(module, inputs, workload, others, tiny, lock)
            if dynamic:
                figures["lengths"] = _at_other_lengths(module, inputs, workload, others)
        except BudgetInfeasibleError as error:
            return {**row, "ok": False, "note": "infeasible", "lowest": error.lowest}
    partitions = [p for p in partitions if not p.replaced]
    foreseen = [p.foreseen for p in partitions if p.foreseen is not None]
    row["foreseen"] = max((each.after for each in foreseen), default=None)
    row["observed"] = max((p.observed for p in partitions if p.observed is not None), default=None)
    row["unseen"] = [p.unseen for p in partitions if p.unseen]
    row["kept"] = sum(each.kept for each in foreseen)
    row["regions"] = [each.regions for each in foreseen]
    return {**row, "ok": True, "setup_s": time.perf_counter() - started - figures.pop("seconds"), **figures}


def _watched(found: list[Partition]) -> AbstractContextManager[object]:
    """The partitions that are made meanwhile."""

    def made(*args: Any, **kwargs: Any) -> Partition:
        found.append(Partition(*args, **kwargs))
        return found[-1]

    return mock.patch.object(entry, "Partition", made)


def _figures(module: Any, inputs: Any, workload: Any, others: int, tiny: bool, lock: Path | None) -> Row:
    """Peak bytes (None on the CPU, where compiled code cannot be tracked) and median milliseconds of steady steps."""
    trial = Trial(module, inputs, workload.step(), others)
    trial.warm_up()
    began = time.perf_counter()
    with alone(lock):
        figures = {"peak": None, "step_ms": sorted(trial._on_cpu(3))[1]} if tiny else trial.figures(15)
    return {**figures, "seconds": time.perf_counter() - began}


def _at_other_lengths(module: Any, inputs: Inputs, workload: Workload, others: int) -> dict[int, int | None]:
    """The peak of some steps at each of them, in bytes, with one optimizer: that of another may still be there."""
    found = {}
    longest = inputs.kwargs["input_ids"].shape[1]
    trial = Trial(module, inputs, workload.step(), others)
    for length in (int(share * longest) for share in _SHARES):
        shorter = Inputs((), {name: tensor[:, :length].contiguous() for name, tensor in inputs.kwargs.items()})
        trial.inputs = trial.loop.inputs = shorter
        trial.warm_up()
        found[length] = trial.figures(5)["peak"] if trial.device.type == "cuda" else None
    return found


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """While no other process of the same lock is here."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--shares", nargs="+", type=float, default=_STOCK, help="activation_memory_budget, of 1 to 0")
    parser.add_argument("--deadline-s", type=float, default=float("inf"))
    parser.add_argument("--lock", type=Path, help="a file that tells processes side by side when to be timed")
    parser.add_argument("--tiny", action="store_true", help="a smoke test on the CPU")
    asked = parser.parse_args()
    end = time.monotonic() + asked.deadline_s
    rows: list[Row] = json.loads(asked.file.read_text()) if asked.file.exists() else []
    for name in asked.only:
        for contender, setting in wanted(name, rows, asked.shares, asked.tiny):
            known = any((row["workload"], row["contender"]) == (name, contender) for row in rows)
            if known or time.monotonic() > end:
                continue
            row = attempted(name, contender, setting, asked.tiny, asked.lock)
            rows.append(row)
            asked.file.write_text(json.dumps(rows, indent=1))
            print(line(row), flush=True)
    return 0


def attempted(name: str, contender: str, setting: Any, tiny: bool, lock: Path | None) -> Row:
    """``trained``, or why it failed."""
    try:
        return trained(name, contender, setting, tiny, lock)
    except Exception as error:
        return {"workload": name, "contender": contender, "setting": setting, "ok": False, "note": reason(error)}


def line(row: Row) -> str:
    """A row of the table."""
    if not row["ok"]:
        return f"{row['workload']:16s} {row['contender']:20s} {row['note']}"
    sizes = row["peak"], row["observed"], row["foreseen"]
    peak, observed, foreseen = (f"{value / 1e6:9.1f} MB" if value else "            " for value in sizes)
    head = f"{row['workload']:16s} {row['contender']:20s} {peak}"
    return f"{head} by its code {observed} by the plan {foreseen} {row['step_ms']:8.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
